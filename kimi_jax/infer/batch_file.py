"""Many prompts in a file, and their answers in another, a line of JSON each.

Answers are written in the order in which they are finished, each with the number of its
line, so that a run that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from kimi_jax.errors import UserError

# What a line may have, and what a value has to be.
_KNOWN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("a string", lambda x: isinstance(x, str)),
    "messages": (
        "a list of objects",
        lambda x: isinstance(x, list) and all(isinstance(m, dict) for m in x),
    ),
    "id": ("anything", lambda x: True),
    "stop": (
        "a string or a list of strings",
        lambda x: (
            isinstance(x, str)
            or (isinstance(x, list) and all(isinstance(s, str) for s in x))
        ),
    ),
    **dict.fromkeys(
        ("max_tokens", "top_k", "seed"), ("an integer", lambda x: type(x) is int)
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p"),
        ("a number", lambda x: type(x) in (int, float)),
    ),
}


def read_prompts(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the file; each has "prompt" or "messages", and may have settings.

    Raises:
      UserError: a line that is not such an object; names it.
    """
    lines = []
    try:
        content = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{os.fspath(path)} is not UTF-8 text: {error}") from error
    for number, text in enumerate(content.split("\n")):
        if not text.strip():
            continue
        where = f"{os.fspath(path)}, line {number + 1}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({error})") from error
        if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
            raise UserError(
                f'{where}: write {{"prompt": "..."}} or {{"messages": [...]}}'
            )
        unknown = sorted(line.keys() - _KNOWN)
        if unknown:
            names = ", ".join(sorted(_KNOWN))
            raise UserError(f"{where}: unknown {unknown[0]!r}; there are {names}")
        for name, value in line.items():
            kind, fits = _KNOWN[name]
            if not fits(value):
                raise UserError(f"{where}: {name}={json.dumps(value)}: must be {kind}")
        lines.append(line | {"line": number + 1})
    if not lines:
        raise UserError(f"{os.fspath(path)}: no prompts in it")
    return lines


class Answers:
    """The file of answers, a context manager; appends, and flushes each line."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        self.done = self._repair()

    def __enter__(self) -> Answers:
        self._file = self._path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, answer: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._file.flush()
        self.done.add(int(answer["line"]))

    def _repair(self) -> set[int]:
        """The lines that are answered; drops an answer that was cut short."""
        if not self._path.exists():
            return set()
        done, whole = set(), b""
        for text in self._path.read_bytes().splitlines(keepends=True):
            if not text.endswith(b"\n"):
                break
            try:
                done.add(int(json.loads(text)["line"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self._path} holds something else than answers; name another file"
                ) from error
            whole += text
        if len(whole) != self._path.stat().st_size:
            self._path.write_bytes(whole)
        return done
