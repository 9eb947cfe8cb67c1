"""Questions on generated documents: RULER's QA without a data set.

Each document tells of one person: where born, which trade, which company. Further
documents tell where the companies are. One hop asks for a person's town of birth; two
hops ask for the town of the company of a person, which no single document holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.tasks.example import Example, Family
from kimi_jax.tasks.text import Text, misfit
from kimi_jax.tasks.words import words

_FIRST = words(
    """
    Ada Boris Clara Dario Edith Fritz Greta Hugo Irma Jonas Klara Linus Marta Nils
    Olga Pavel Quinn Rosa Stefan Thea Ulrich Vera Walter Xenia Yusuf Zelda
    """
)
_LAST = words(
    """
    Abel Brandt Castor Dorn Eklund Farkas Gruber Holm Ivers Jansen Koval Lindt
    Moreau Novak Orlov Petri Quist Rossi Sandor Tamm Urban Vogel Weiss Yates Zeman
    """
)
_TOWNS = words(
    """
    Arden Bryn Corval Delmar Elsing Farrow Garnet Haldon Istria Jorvik Kelso Lorne
    Marsh Norden Oakham Porto Quill Rhyl Selby Torrin Ulva Varna Wexley Yarrow
    """
)
_TRADES = words(
    """
    baker tailor mason glazier printer brewer cooper potter
    """
)
_COMPANIES = words(
    """
    Acorn Bluebell Copper Dynamo Emerald Foxglove Granite Harvest Indigo Juniper
    Kestrel Linden Magnet Nimbus Orchard Pioneer Quartz Rowan Summit Timber
    """
)


@dataclasses.dataclass(frozen=True)
class Questions:
    """One question on documents about `people` in the filler; the answer is a town."""

    family: ClassVar[Family] = "retrieval"
    text: Text = dataclasses.field(repr=False, compare=False)
    length: int = 2048
    people: int = 4
    hops: int = 1

    @property
    def vocab_size(self) -> int:
        return self.text.tokenizer.vocab_size

    def problems(self) -> Iterator[str]:
        most = len(_FIRST) * len(_LAST)
        if not 1 <= self.people <= most:
            yield f"people={self.people}: must be from 1 to {most}"
        elif self.hops not in (1, 2):
            yield f"hops={self.hops}: must be 1 or 2"
        else:
            yield from misfit(self.example)

    def example(self, rng: np.random.Generator) -> Example:
        names = _people(rng, self.people)
        born, trade, works = (
            [listed[i] for i in rng.integers(len(listed), size=self.people)]
            for listed in (_TOWNS, _TRADES, _COMPANIES)
        )
        companies = sorted(set(works))
        seats = [_TOWNS[i] for i in rng.integers(len(_TOWNS), size=len(companies))]
        documents = [
            f"Document: {name} was born in {town} and is a {job} at {company}. "
            for name, town, job, company in zip(names, born, trade, works, strict=True)
        ]
        if self.hops == 2:
            documents += [
                f"Document: The workshop of {company} is in {town}. "
                for company, town in zip(companies, seats, strict=True)
            ]
        depths = rng.random(len(documents)).tolist()
        if self.hops == 1:
            question, answer = f"{names[0]} was born in", born[0]
        else:
            question = f"The workshop where {names[0]} works is in"
            answer = seats[companies.index(works[0])]
        head = "Answer the question at the end from the documents in the text.\n"
        end = [(f"\nQuestion and answer: {question}", -1), (f" {answer}", 0)]
        inserts = list(zip(depths, documents, strict=True))
        return self.text.compose(rng, self.length, head, inserts, end)


def _people(rng: np.random.Generator, count: int) -> list[str]:
    total = len(_FIRST) * len(_LAST)
    chosen = rng.choice(total, count, replace=False).tolist()
    return [f"{_FIRST[i // len(_LAST)]} {_LAST[i % len(_LAST)]}" for i in chosen]
