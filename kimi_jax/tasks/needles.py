"""Needles in a haystack, with the dials of RULER (Hsieh et al. 2024).

Sentences "The magic number of KEY is VALUE." lie in the filler; the end asks for the
values of some keys and holds them, as answers, in the order in which they lie in the
text. RULER takes any order; fixing it makes every answer one string of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.tasks.example import Example, Family
from kimi_jax.tasks.text import Text, misfit
from kimi_jax.tasks.words import key_names, numbers

_HEAD = "Some magic numbers are hidden in the following text. Remember them.\n"


@dataclasses.dataclass(frozen=True)
class Needle:
    """`keys` keys of `values` numbers each; `queries` of the keys are asked for."""

    family: ClassVar[Family] = "retrieval"
    text: Text = dataclasses.field(repr=False, compare=False)
    length: int = 1024
    depth: float = -1.0  # of the first asked needle, 0: start, 1: end; -1: at random
    keys: int = 1
    values: int = 1
    queries: int = 1
    digits: int = 7

    @property
    def vocab_size(self) -> int:
        return self.text.tokenizer.vocab_size

    def problems(self) -> Iterator[str]:
        if self.depth != -1.0 and not 0.0 <= self.depth <= 1.0:
            yield f"depth={self.depth}: from 0, the start, to 1, or -1 for any"
        if not 1 <= self.digits <= 12:
            yield f"digits={self.digits}: must be from 1 to 12"
        if self.values < 1 or not 1 <= self.keys <= 512:
            yield (
                f"keys={self.keys}, values={self.values}: must be 1 to 512 keys and at "
                "least 1 value"
            )
        if not 1 <= self.queries <= self.keys:
            yield f"queries={self.queries}: must be from 1 to keys={self.keys}"
        elif self.keys * self.values > 10**self.digits // 4:
            yield f"digits={self.digits}: too few for different values; raise digits"
        else:
            yield from misfit(self.example)

    def example(self, rng: np.random.Generator) -> Example:
        keys = key_names(rng, self.keys)
        values = numbers(rng, self.keys * self.values, self.digits)
        depths = rng.random(len(values))
        if self.depth >= 0.0:
            depths[0] = self.depth
        # A stable sort, as in `compose`, so that the answers follow the text.
        order = np.argsort(depths, kind="stable").tolist()
        owner = {i: keys[i // self.values] for i in order}
        inserts = [
            (float(depths[i]), f"The magic number of {owner[i]} is {values[i]}. ")
            for i in order
        ]
        end, answer = [], 0
        for key in keys[: self.queries]:
            found = [values[i] for i in order if owner[i] == key]
            plural = "s" if len(found) > 1 else ""
            end.append((f"\nThe magic number{plural} of {key}, in order:", -1))
            for value in found:
                end.append((f" {value}", answer))
                answer += 1
        return self.text.compose(rng, self.length, _HEAD, inserts, end)
