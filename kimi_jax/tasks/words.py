"""Words, names and numbers that generated text is made of."""

from __future__ import annotations

import string

import numpy as np


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    """What lies between commas."""
    return [" ".join(part.split()) for part in text.split(",")]


ADJECTIVES = words(
    """
    amber ashen bold brisk calm coral crisp dusky early eager fabled faint gentle
    gilded grand hazel humble ivory jolly keen lively mellow misty noble olive pale
    quiet rapid silent tawny velvet woven
    """
)
NOUNS = words(
    """
    anchor badger beacon candle cedar comet ember falcon fiddle garnet glacier
    harbor heron island jasmine kettle lantern lagoon marble meadow nectar otter
    pebble quarry raven saddle thistle tulip urchin valley walnut zephyr
    """
)
PEOPLE = words(
    """
    baker teacher farmer sailor painter miller weaver doctor singer porter clerk
    gardener mason tailor cook hunter
    """
)
VERBS = words(
    """
    carried watched found mended sold praised cleaned followed painted guarded
    lifted counted moved kept showed borrowed
    """
)
THINGS = words(
    """
    basket bridge blanket ladder wagon mirror statue barrel table curtain fence boat
    chair drum hammer plough
    """
)
WHEN = phrases(
    """
    in the morning, at noon, after the rain, before supper, on market day, in early
    spring, at the end of the week, late at night
    """
)
_SYLLABLES = words(
    """
    ba be bi bo bu da de di do du fa fe fi fo ga ge go gu ka ke ki ko la le li lo lu
    ma me mi mo mu na ne ni no pa pe pi po ra re ri ro sa se si so ta te ti to va ve
    vi vo za ze zi zo
    """
)


def key_names(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different names such as "amber falcon"."""
    total = len(ADJECTIVES) * len(NOUNS)
    chosen = rng.choice(total, count, replace=False).tolist()
    return [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in chosen]


def numbers(rng: np.random.Generator, count: int, digits: int) -> list[str]:
    """`count` different numbers of so many digits, the first of them not 0."""
    low = 10 ** (digits - 1)
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(int(rng.integers(low, 10 * low)))] = None
    return list(found)


def letter_names(rng: np.random.Generator, count: int) -> list[str]:
    """Different names of five capital letters."""
    letters = list(string.ascii_uppercase)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(letters, 5).tolist())] = None
    return list(found)


def made_up(rng: np.random.Generator, count: int) -> list[str]:
    """Different words of three syllables; no more than half of all that exist."""
    base = len(_SYLLABLES)
    count = min(count, base**3 // 2)
    chosen = rng.choice(base**3, count, replace=False).tolist()
    return [
        _SYLLABLES[i // base**2] + _SYLLABLES[i // base % base] + _SYLLABLES[i % base]
        for i in chosen
    ]
