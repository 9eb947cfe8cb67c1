"""Messages to tokens, as the folder of a published model says.

The template (chat_template.jinja, or an entry of tokenizer_config.json) is a program
from whoever made the folder: it runs in Jinja's sandbox. What it writes is text in
which special tokens are spelled out, and so may be those that a user has typed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import sandbox

from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError

TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class Chat:
    """How a model is talked to.

    Attributes:
      specials: ids of the special tokens by their text.
      ends: tokens that end an answer.
    """

    template: jinja2.Template | None
    specials: Mapping[str, int]
    names: Mapping[str, str]  # such as bos_token, for the template
    ends: tuple[int, ...]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Args:
          messages: {"role": ..., "content": ...} each.

        Raises:
          UserError: there is no template, or it does not take these messages.
        """
        if self.template is None:
            raise UserError(
                f"there is no chat template ({TEMPLATE}, or chat_template in "
                f"{SETTINGS}); give a prompt instead of messages"
            )
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self.names
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the chat template refuses: {error}") from error

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """The ids of a text in which special tokens are spelled out."""
        if not self.specials:
            return tokenizer.encode(text.encode()).tolist()
        longest_first = sorted(self.specials, key=len, reverse=True)
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
            if part in self.specials:
                tokens.append(self.specials[part])
            elif part:
                tokens += tokenizer.encode(part.encode()).tolist()
        return tokens


def load_chat(folder: str | os.PathLike[str]) -> Chat:
    """What the folder of a model says about conversations; nothing, if it does not.

    Raises:
      UserError: a file that is not JSON, or a template that is not one.
    """
    where = pathlib.Path(folder)
    settings = _json(where / SETTINGS)
    specials = {
        str(token["content"]): int(i)
        for i, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    for token in _json(where / "tokenizer.json").get("added_tokens") or []:
        specials.setdefault(str(token["content"]), int(token["id"]))
    names = {}
    for entry in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(entry)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            names[entry] = str(value)
    ends = _json(where / GENERATION).get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return Chat(_template(where, settings), specials, names, tuple(map(int, ends)))


def _template(
    where: pathlib.Path, settings: Mapping[str, Any]
) -> jinja2.Template | None:
    file = where / TEMPLATE
    source = file.read_text() if file.is_file() else settings.get("chat_template")
    if source is None:
        return None
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), ""))

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(
        x, ensure_ascii=False, indent=indent
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template in {where} is broken: {error}") from error


def _json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{str(file)!r} is not JSON ({error}); mend it") from error
    return content if isinstance(content, dict) else {}
