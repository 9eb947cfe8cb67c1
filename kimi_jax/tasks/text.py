"""Prose to hide things in, and prompts of a given length.

A prompt is <bos>, an introduction, filler with sentences inserted at given depths, and
an end that holds the answers. Filler is generated, or consecutive sentences of a corpus
from a random place on. Every sentence is encoded by itself, so a prompt is as long as
its parts whatever the tokenizer, and never longer than asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError
from kimi_jax.tasks.example import Example, written
from kimi_jax.tasks.words import ADJECTIVES, PEOPLE, THINGS, VERBS, WHEN


class Haystack(Protocol):
    """Filler: sentences one after the other."""

    @property
    def digest(self) -> str: ...

    def read(self, rng: np.random.Generator) -> Iterator[bytes]: ...


class Prose:
    """Generated sentences without end."""

    digest = "generated"

    def read(self, rng: np.random.Generator) -> Iterator[bytes]:
        lists = (ADJECTIVES, PEOPLE, VERBS, ADJECTIVES, THINGS, WHEN)
        sizes = [len(words) for words in lists]
        while True:
            for row in rng.integers(sizes, size=(256, len(sizes))).tolist():
                a, who, did, b, what, when = (
                    words[i] for words, i in zip(lists, row, strict=True)
                )
                yield f"The {a} {who} {did} the {b} {what} {when}. ".encode()


class Corpus:
    """The sentences of real text, from a random one on, round and round."""

    def __init__(self, sentences: Sequence[bytes]):
        if not sentences:
            raise UserError("haystack=corpus: config.data.sources holds no sentence")
        self._sentences = sentences
        found = hashlib.sha256()
        for sentence in sentences:
            found.update(f"{len(sentence)}\n".encode() + sentence)
        self.digest = found.hexdigest()[:16]

    def read(self, rng: np.random.Generator) -> Iterator[bytes]:
        at = int(rng.integers(len(self._sentences)))
        while True:
            yield self._sentences[at]
            at = (at + 1) % len(self._sentences)


class Nothing:
    """No filler."""

    digest = "none"

    def read(self, rng: np.random.Generator) -> Iterator[bytes]:
        return iter(())


def sentences_of(text: bytes) -> list[bytes]:
    """The sentences of a corpus, each on one line and with a space behind it."""
    joined = b" ".join(text.split())
    return [s + b" " for s in re.split(rb"(?<=[.!?]) ", joined) if s]


@dataclasses.dataclass(frozen=True)
class Text:
    """What tasks of text are made with."""

    tokenizer: Tokenizer
    haystack: Haystack

    def compose(
        self,
        rng: np.random.Generator,
        length: int,
        head: str,
        inserts: Sequence[tuple[float, str]],
        end: Sequence[tuple[str, int]],
    ) -> Example:
        """A prompt of at most `length` inputs, as near to it as sentences allow.

        Args:
          head: before the filler.
          inserts: (depth in the filler from 0 to 1, sentence).
          end: (text, number of the answer that it is, or -1), in order.

        Raises:
          UserError: what must be there is longer than `length`.
        """
        encode = self.tokenizer.encode
        fixed = [encode(text.encode()) for text in (head, *(s for _, s in inserts))]
        tail = [(encode(text.encode()), answer) for text, answer in end]
        needed = 1 + sum(map(len, fixed)) + sum(len(ids) for ids, _ in tail)
        left = length + 1 - needed
        if left < 0:
            raise UserError(
                f"length={length}: the task alone takes {needed - 1} tokens; raise "
                f"length to {2 ** (needed - 1).bit_length()}"
            )
        filler: list[np.ndarray] = []
        for sentence in self.haystack.read(rng):
            ids = encode(sentence)
            if len(ids) > left:
                break
            left -= len(ids)
            filler.append(ids)
        order = sorted(range(len(inserts)), key=lambda i: inserts[i][0])
        pieces: list[tuple[Sequence[int] | np.ndarray, int]] = []
        pieces += [([self.tokenizer.bos], -1), (fixed[0], -1)]
        at = 0
        for i in order:
            until = round(inserts[i][0] * len(filler))
            pieces += [(ids, -1) for ids in filler[at:until]]
            pieces.append((fixed[1 + i], -1))
            at = until
        pieces += [(ids, -1) for ids in filler[at:]]
        return written([*pieces, *tail])


def misfit(example: Callable[[np.random.Generator], Example]) -> Iterator[str]:
    """The problem of a generator whose instances are too long for its length."""
    for seed in range(4):
        try:
            example(np.random.default_rng(seed))
        except UserError as error:
            yield str(error)
            return
