"""Pictures of numbers, drawn on the spot: a task that takes reading and nothing else.

Example i is a number of one to three digits in Pillow's built-in font, at a random
place and in random shades, and its text: "<image>407". What it shows follows from
(seed, i) alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kimi_jax.data.media import MARK, Example, Item
from kimi_jax.errors import UserError

HEIGHT, WIDTH = 28, 56  # two merged patches of 28 x 28
FONT_SIZE = 22


def examples(count: str, seed: int) -> Iterator[Example]:
    """`count` examples.

    Raises:
      UserError: `count` is not a number of at least 2.
    """
    if not count.isdecimal() or int(count) < 2:
        raise UserError(
            f"config.data.sources: 'words:{count}'; write words:NUMBER, such as "
            "words:4096"
        )
    for i in range(int(count)):
        text = number(seed, i)
        item = Item(text, HEIGHT, WIDTH, 1, functools.partial(draw, seed, i))
        yield Example(f"example {i}", f"{MARK}{text}", (item,))


def number(seed: int, i: int) -> str:
    """What example `i` shows."""
    rng = np.random.default_rng([seed, i])
    return "".join(map(str, rng.integers(0, 10, rng.integers(1, 4))))


def draw(seed: int, i: int) -> np.ndarray:
    """The picture of example `i`: RGB bytes [1, HEIGHT, WIDTH, 3]."""
    rng = np.random.default_rng([seed, i, 1])
    dark, light = rng.integers(0, 80, 3), rng.integers(176, 256, 3)
    if rng.integers(2):
        dark, light = light, dark
    image = Image.new("RGB", (WIDTH, HEIGHT), tuple(light.tolist()))
    pen, font = ImageDraw.Draw(image), _font()
    text = number(seed, i)
    left, top, right, bottom = pen.textbbox((0, 0), text, font)
    x = rng.integers(0, max(1, WIDTH - int(right - left))) - left
    y = rng.integers(0, max(1, HEIGHT - int(bottom - top))) - top
    pen.text((x, y), text, tuple(dark.tolist()), font)
    return np.asarray(image)[None]


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_SIZE)
