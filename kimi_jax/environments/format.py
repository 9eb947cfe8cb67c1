"""Conversations as tokens.

    <bos> <system> tools... <end> <user> question <end>
    <assistant> get k7 a <end> <tool> =m3 <end> <assistant> say m3 <end>

A role token opens a turn and <end> closes it; no text spells either. The policy writes
what follows <assistant>, its <end> included; the environment all else, <assistant>
included. A turn that the policy left without <end> ends where the next role begins.

The byte tokenizer has ids of its own for these five. A tokenizer file needs special
tokens of one of the names in `NAMES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
NAMES: Mapping[str, tuple[str, ...]] = {
    "end": ("<|im_end|>", "<end>"),
    "system": ("<|im_system|>", "<system>"),
    "user": ("<|im_user|>", "<user>"),
    "assistant": ("<|im_assistant|>", "<assistant>"),
    "tool": ("<|im_tool|>", "<tool>"),
}


class BadTurn(ValueError):
    """What is wrong with a turn, in words for the policy that wrote it."""


@dataclasses.dataclass(frozen=True)
class Format:
    """See the module; made by `make_format`."""

    tokenizer: Tokenizer
    bos: int
    end: int
    roles: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """The ids of text, whatever it spells."""
        return self.tokenizer.encode(text.encode()).tolist()

    def render(self, role: str, text: str) -> list[int]:
        """A whole turn: role, text, end."""
        return [self.roles[role], *self.encode(text), self.end]

    def open(self, role: str) -> list[int]:
        """What comes before the text of a turn."""
        return [self.roles[role]]

    def close(self, text: str) -> list[int]:
        """A turn of the policy: what it writes after `open("assistant")`."""
        return [*self.encode(text), self.end]

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text; specials vanish.

        Raises:
          UserError: an id is outside the vocabulary.
        """
        return self.tokenizer.decode(tokens)

    def read(self, tokens: Sequence[int]) -> str:
        """The text of a turn of the policy.

        Raises:
          BadTurn: no end token, other special tokens, or ids outside the vocabulary.
        """
        if not tokens or tokens[-1] != self.end:
            raise BadTurn("error: turn without end")
        body = list(tokens[:-1])
        try:
            text = self.text_of(body)
        except (UserError, TypeError, ValueError, OverflowError) as error:
            raise BadTurn("error: invalid token") from error
        special = {self.bos, self.end, self.tokenizer.eod, self.tokenizer.pad}
        if special.union(self.roles.values()).intersection(body):
            raise BadTurn("error: special token in a turn")
        return text

    def policy_mask(self, tokens: Sequence[int]) -> np.ndarray:
        """Which tokens the policy wrote, bool [N].

        Exact unless the policy itself wrote role tokens or <end> amid a turn; whoever
        samples knows its spans and need not ask.
        """
        mask_N = np.zeros(len(tokens), bool)
        roles, mine = set(self.roles.values()), False
        for i, token in enumerate(tokens):
            if token in roles:
                mine = token == self.roles["assistant"]
                continue
            mask_N[i] = mine
            mine = mine and token != self.end
        return mask_N

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens for a reader: roles and ends spelled out, a line for each turn."""
        names = {self.bos: "<bos>", self.end: "<end>"}
        names |= {i: f"\n<{role}>" for role, i in self.roles.items()}
        parts: list[str] = []
        plain: list[int] = []
        for token in [*tokens, None]:
            if token is not None and token not in names:
                plain.append(token)
                continue
            if plain:
                parts.append(self.text_of(plain))
                plain = []
            parts.append("" if token is None else names[token])
        return "".join(parts).strip("\n")


def make_format(tokenizer: Tokenizer) -> Format:
    """The format in the tokens of `tokenizer`.

    Raises:
      UserError: it lacks special tokens for roles, or text.
    """
    found: dict[str, int] = {}
    for part, names in NAMES.items():
        known = [tokenizer.specials[x] for x in names if x in tokenizer.specials]
        if known:
            found[part] = known[0]
    lacking = [part for part in NAMES if part not in found]
    if lacking:
        wanted = ", ".join(" or ".join(map(repr, NAMES[part])) for part in lacking)
        raise UserError(
            f"config.data.tokenizer={tokenizer.name!r} has no special token for "
            f"{', '.join(lacking)}; name unused ids {wanted} in added_tokens_decoder "
            "of tokenizer_config.json (or as special added_tokens of tokenizer.json), "
            "or use --config.data.tokenizer=bytes"
        )
    return Format(tokenizer, tokenizer.bos, found.pop("end"), found)
