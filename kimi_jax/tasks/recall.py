"""Recall of what was read: the tasks on which linear attention is usually compared.

Sources: MQAR is that of "Zoology" (Arora et al. 2023), palindrome and the sizes those
of the Kimi Linear report, Sec. 5. Symbols are token ids from 0; no text is involved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.tasks.example import Example, Family, written


@dataclasses.dataclass(frozen=True)
class MQAR:
    """Multi-query associative recall.

    key value, `pairs` times; then every key again, each followed by its value, which is
    the answer. Blanks lie between these queries, at random, as many as fill `length`.
    Keys of an instance differ. Keys are ids below symbols / 2, values are the others,
    and the blank is the id `symbols`.
    """

    family: ClassVar[Family] = "recall"
    length: int = 64
    pairs: int = 8
    symbols: int = 64

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def problems(self) -> Iterator[str]:
        if self.symbols % 2:
            yield f"symbols={self.symbols}: must be even, half keys and half values"
        if not 1 <= self.pairs <= self.symbols // 2:
            yield (
                f"pairs={self.pairs}: must be from 1 to symbols / 2 = "
                f"{self.symbols // 2}, as keys differ"
            )
        if self.length < 4 * self.pairs - 1:
            yield _longer(self.length, 4 * self.pairs - 1, f"pairs={self.pairs}")

    def example(self, rng: np.random.Generator) -> Example:
        half, pairs = self.symbols // 2, self.pairs
        key_P = rng.choice(half, pairs, replace=False)
        value_P = half + rng.integers(half, size=pairs)
        blanks = self.length + 1 - 4 * pairs
        asked = np.zeros(blanks + pairs, bool)
        asked[rng.choice(blanks + pairs, pairs, replace=False)] = True
        order = iter(rng.permutation(pairs).tolist())
        pieces = [(np.stack([key_P, value_P], axis=1).ravel(), -1)]
        for number, is_query in enumerate(asked.tolist()):
            if not is_query:
                pieces.append((np.array([self.symbols]), -1))
                continue
            pair = next(order)
            pieces += [(key_P[[pair]], -1), (value_P[[pair]], number)]
        return written(pieces)


@dataclasses.dataclass(frozen=True)
class Copy:
    """`items` symbols, blanks up to `length`, a mark, and the symbols again.

    Symbols are ids below `symbols`, then come the blank and the mark. Each repeated
    symbol is an answer of its own.
    """

    family: ClassVar[Family] = "recall"
    reverse: ClassVar[bool] = False
    length: int = 64
    items: int = 16
    symbols: int = 64

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2

    def problems(self) -> Iterator[str]:
        for name in ("items", "symbols"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1"
        if self.length < 2 * self.items:
            yield _longer(self.length, 2 * self.items, f"items={self.items}")

    def example(self, rng: np.random.Generator) -> Example:
        item_I = rng.integers(self.symbols, size=self.items)
        blanks = np.full(self.length - 2 * self.items, self.symbols)
        again_I = item_I[::-1] if self.reverse else item_I
        return written(
            [
                (item_I, -1),
                (blanks, -1),
                ([self.symbols + 1], -1),
                *((again_I[[i]], i) for i in range(self.items)),
            ]
        )


@dataclasses.dataclass(frozen=True)
class Palindrome(Copy):
    """`Copy`, with the symbols in reversed order at the end."""

    reverse: ClassVar[bool] = True


def _longer(length: int, needed: int, why: str) -> str:
    return f"length={length}: {why} takes at least {needed} tokens; raise length"
