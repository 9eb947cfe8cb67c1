"""State that has to be followed, which a recurrence can and a few layers cannot.

Symbols are token ids from 0; no text is involved.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.tasks.example import Example, Family, written

PUSH, POP = 0, 1


@dataclasses.dataclass(frozen=True)
class Stack:
    """Pushes and pops on several stacks (Kimi Linear report, Sec. 5: 64 of them).

    An operation is three tokens: push or pop, the stack, the element. The element of a
    pop is an answer. A pop follows with probability 1/2 wherever there is something to
    pop, on any of the stacks that are not empty. Ids: push, pop, stacks, elements.
    """

    family: ClassVar[Family] = "state"
    length: int = 64
    stacks: int = 4
    symbols: int = 16

    @property
    def vocab_size(self) -> int:
        return 2 + self.stacks + self.symbols

    def problems(self) -> Iterator[str]:
        for name in ("stacks", "symbols"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1"
        if self.length < 5:
            yield f"length={self.length}: a push and a pop take 5 tokens; raise length"

    def example(self, rng: np.random.Generator) -> Example:
        operations = (self.length + 1) // 3
        first_element = 2 + self.stacks
        held: list[list[int]] = [[] for _ in range(self.stacks)]
        pieces: list[tuple[list[int], int]] = []
        pop_N = rng.random(operations) < 0.5
        pop_N[-1] = True  # so that something is asked
        for number, wants_pop in enumerate(pop_N.tolist()):
            full = [s for s, elements in enumerate(held) if elements]
            if wants_pop and full:
                stack = full[int(rng.integers(len(full)))]
                pieces += [([POP, 2 + stack], -1), ([held[stack].pop()], number)]
            else:
                stack = int(rng.integers(self.stacks))
                held[stack].append(first_element + int(rng.integers(self.symbols)))
                pieces.append(([PUSH, 2 + stack, held[stack][-1]], -1))
        return written(pieces)


@dataclasses.dataclass(frozen=True)
class Permutations:
    """The word problem of the symmetric group: the product of all that was read.

    A token is a permutation of `items` things, by its lexicographic number. The label
    of position t is p_t after p_{t-1} after ... p_0, in the same numbering. With five
    things no fixed number of layers of attention can do it for all lengths ("The
    Illusion of State in State-Space Models", Merrill et al. 2024).
    """

    family: ClassVar[Family] = "state"
    length: int = 32
    items: int = 5

    @property
    def vocab_size(self) -> int:
        return math.factorial(self.items)

    def problems(self) -> Iterator[str]:
        if not 2 <= self.items <= 6:
            yield f"items={self.items}: must be from 2 to 6; 6 are 720 permutations"
        if self.length < 1:
            yield f"length={self.length}: must be at least 1"

    def example(self, rng: np.random.Generator) -> Example:
        places, number_of = _group(self.items)
        tokens_T = rng.integers(len(places), size=self.length).astype(np.int32)
        state, labels = tuple(range(self.items)), []
        for token in tokens_T.tolist():
            state = tuple(places[token][at] for at in state)
            labels.append(number_of[state])
        return Example(
            tokens_T,
            np.array(labels, np.int32),
            np.arange(self.length, dtype=np.int32),
        )


@functools.cache
def _group(
    items: int,
) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], int]]:
    """Permutations in lexicographic order, and the number of each."""
    places = list(itertools.permutations(range(items)))
    return places, {place: number for number, place in enumerate(places)}
