"""Tokens as they come, to text as it can be shown."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_jax.data.tokenizer import Tokenizer


class TextStream:
    """Text of tokens that arrive in pieces.

    Holds back what later tokens may still change: the bytes of a character that is not
    whole, and the beginning of a stop string.

    Args:
      stops: the text ends before the first of these, wherever tokens begin and end.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(filter(None, stops))
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that these tokens make certain; with `last`, all that is left."""
        self._tokens += tokens
        text, done = cut(self._tokenizer.decode(self._tokens), self._stops)
        if not last and not done:
            whole = text.rstrip("\ufffd")
            text = whole[: len(whole) - self._begun(whole)]
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens, the first of all included, has a stop."""
        return cut(self._tokenizer.decode(tokens), self._stops)[1]

    def _begun(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(text before the first stop string, whether there is one)."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)
