"""Answers that no single sentence holds: RULER's tracing and aggregation.

Variables are followed through a text, words are counted over all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.tasks.example import Example, Family
from kimi_jax.tasks.text import Nothing, Text, misfit
from kimi_jax.tasks.words import NOUNS, letter_names, made_up, numbers


@dataclasses.dataclass(frozen=True)
class Variables:
    """Chains of assignments; which variables hold the value of the first chain?

    "VAR ABCDE = 1234567." opens a chain, "VAR FGHIJ = VAR ABCDE." carries it on,
    `hops` times. The answers are the variables of one chain, from first to last.
    """

    family: ClassVar[Family] = "long horizon"
    text: Text = dataclasses.field(repr=False, compare=False)
    length: int = 1024
    chains: int = 2
    hops: int = 4

    @property
    def vocab_size(self) -> int:
        return self.text.tokenizer.vocab_size

    def problems(self) -> Iterator[str]:
        if self.chains < 1 or self.hops < 0:
            yield f"chains={self.chains}, hops={self.hops}: 1 chain, 0 hops or more"
        else:
            yield from misfit(self.example)

    def example(self, rng: np.random.Generator) -> Example:
        links = self.hops + 1
        names = letter_names(rng, self.chains * links)
        values = numbers(rng, self.chains, 7)
        inserts = []
        for chain, value in enumerate(values):
            mine = names[chain * links : (chain + 1) * links]
            sources = [value, *(f"VAR {name}" for name in mine[:-1])]
            for name, source, depth in zip(
                mine, sources, np.sort(rng.random(links)).tolist(), strict=True
            ):
                inserts.append((depth, f"VAR {name} = {source}. "))
        head = "Follow the variables that are assigned in the following text.\n"
        end = [(f"\nThe variables that hold {values[0]}, in order:", -1)]
        end += [(f" {name}", i) for i, name in enumerate(names[:links])]
        return self.text.compose(rng, self.length, head, inserts, end)


@dataclasses.dataclass(frozen=True)
class CommonWords:
    """A list in which some words stand often, the others seldom; name the former.

    `words` words stand `often` times each, others `seldom` times each, as many of these
    as the length allows, all shuffled. The answers are in alphabetical order.
    """

    family: ClassVar[Family] = "long horizon"
    text: Text = dataclasses.field(repr=False, compare=False)
    length: int = 1024
    words: int = 4
    often: int = 10
    seldom: int = 2

    @property
    def vocab_size(self) -> int:
        return self.text.tokenizer.vocab_size

    def problems(self) -> Iterator[str]:
        if not 1 <= self.words <= len(NOUNS):
            yield f"words={self.words}: must be from 1 to {len(NOUNS)}"
        elif not 1 <= self.seldom < self.often:
            yield f"often={self.often}, seldom={self.seldom}: 1 <= seldom < often"
        else:
            yield from misfit(self.example)

    def example(self, rng: np.random.Generator) -> Example:
        common = [NOUNS[i] for i in rng.choice(len(NOUNS), self.words, replace=False)]
        listed = common * self.often
        end = [("\nThe words that stand most often, in alphabetical order:", -1)]
        end += [(f" {word}", i) for i, word in enumerate(sorted(common))]
        fixed = " ".join(listed) + "".join(text for text, _ in end)
        room = self.length - len(_HEAD_WORDS) - len(fixed) - 8
        # A made-up word has six letters, which is at most as many tokens.
        rare = made_up(rng, max(0, room // (7 * self.seldom)))
        listed += rare * self.seldom
        return _word_list(self.text, rng, self.length, listed, end)


@dataclasses.dataclass(frozen=True)
class FrequentWords:
    """Made-up words with frequencies of a power law; name the most frequent.

    The words of rank r stand in proportion to r^-alpha; the counts of the first
    `words` differ. The answers go from the most frequent down.
    """

    family: ClassVar[Family] = "long horizon"
    text: Text = dataclasses.field(repr=False, compare=False)
    length: int = 1024
    words: int = 3
    alpha: float = 2.0

    @property
    def vocab_size(self) -> int:
        return self.text.tokenizer.vocab_size

    def problems(self) -> Iterator[str]:
        if not 1 <= self.words <= 10:
            yield f"words={self.words}: must be from 1 to 10"
        elif not 1.0 < self.alpha <= 4.0:
            yield f"alpha={self.alpha}: must be above 1 and at most 4"
        elif not self._counts()[self.words - 1] > self._counts()[self.words]:
            yield (
                f"length={self.length}: too short to tell the {self.words} most "
                "frequent words apart; raise length or lower words"
            )
        else:
            yield from misfit(self.example)

    def _counts(self) -> np.ndarray:
        """How often each word stands, by rank; made to differ up to rank `words`."""
        rank_R = np.arange(1, 4 * self.words + 9)
        share_R = rank_R**-self.alpha
        room = max(0, self.length - 160 - 8 * self.words) // 7
        count_R = np.floor(room * share_R / share_R.sum()).astype(int)
        # Ties among the answers would leave their order open.
        for r in range(self.words, 0, -1):
            count_R[r - 1] = max(count_R[r - 1], count_R[r] + (count_R[r] > 0))
        return count_R

    def example(self, rng: np.random.Generator) -> Example:
        count_R = self._counts()
        words = made_up(rng, len(count_R))
        listed = [
            word for word, n in zip(words, count_R, strict=True) for _ in range(n)
        ]
        end = [("\nThe most frequent words, from the most frequent down:", -1)]
        end += [(f" {word}", i) for i, word in enumerate(words[: self.words])]
        return _word_list(self.text, rng, self.length, listed, end)


_HEAD_WORDS = "Count the words of the following list.\n"


def _word_list(
    text: Text,
    rng: np.random.Generator,
    length: int,
    listed: list[str],
    end: list[tuple[str, int]],
) -> Example:
    """The words shuffled, without filler: the list is as long as the prompt may be."""
    order = rng.permutation(len(listed)).tolist()
    head = _HEAD_WORDS + " ".join(listed[i] for i in order)
    bare = Text(text.tokenizer, Nothing())
    return bare.compose(rng, length, head, [], end)
