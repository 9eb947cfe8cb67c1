"""One array of ours and the published tensors that hold the same numbers.

Every entry of a table has one form, which inverts by construction:

    ours = published.flat[:size].reshape(split).transpose(order)

A torch Linear [out, in] becomes [in, out] by splitting out into heads or not, and
moving in to the front; a vector keeps its axes. Experts, which are published one by
one, are stacked along a first axis. `A_log` is published with zeros behind it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kimi_jax.errors import UserError

Shape = tuple[int, ...]
_TILE = 128


class InteropError(UserError):
    """A published checkpoint cannot be read or written, or does not fit."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """`name` is ours, with its collection; `published` the tensors that hold it.

    Attributes:
      name: canonical, such as "params/layer_003/attention/mla/q_b".
      published: names of the tensors; several are stacked along axis 0.
      stored: shape of each of them.
      split: shape that its first values are given; the others are padding, zero.
      order: axes of `split`, in our order.
      stacked: ours has a first axis that counts the tensors.
      precise: the releases keep it in float32.
    """

    name: str
    published: tuple[str, ...]
    stored: Shape
    split: Shape
    order: tuple[int, ...]
    stacked: bool = False
    precise: bool = False

    @property
    def cell(self) -> Shape:
        """Shape of what one published tensor becomes."""
        return tuple(self.split[axis] for axis in self.order)

    @property
    def shape(self) -> Shape:
        """Shape of our array."""
        return ((len(self.published),) if self.stacked else ()) + self.cell

    def to_ours(self, published: np.ndarray) -> np.ndarray:
        """What one published tensor [*stored] becomes: [*cell], a view if it can be.

        Raises:
          InteropError: the padding holds something, which would be lost.
        """
        size = math.prod(self.split)
        if size < math.prod(self.stored):
            flat = published.reshape(-1)
            if np.any(flat[size:] != 0):
                raise InteropError(
                    f"{self.published[0]}: values after the first {size} must be "
                    "padding, but are not zero; the config's sizes are not those of "
                    "the checkpoint"
                )
            published = flat[:size]
        return transpose(published.reshape(self.split), self.order)

    def to_published(self, cell: np.ndarray) -> np.ndarray:
        """The inverse of `to_ours`."""
        inverse = tuple(int(axis) for axis in np.argsort(self.order))
        values = transpose(cell, inverse).reshape(-1)
        missing = math.prod(self.stored) - values.size
        if missing:
            values = np.concatenate([values, np.zeros(missing, values.dtype)])
        return values.reshape(self.stored)


def transpose(x: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """`x.transpose(order)`, contiguous; a view if nothing moves.

    NumPy walks one side of a transpose with a stride, a cache line for each value. A
    matrix is therefore copied in tiles that fit the cache, about nine times as fast.
    """
    first = order[0] if order else 0
    if order == tuple(range(x.ndim)):
        return np.ascontiguousarray(x)
    if order != (*range(first, x.ndim), *range(first)):
        return np.ascontiguousarray(x.transpose(order))
    shape = tuple(x.shape[axis] for axis in order)
    rows = math.prod(x.shape[:first])
    # As plain integers: NumPy moves dtypes of others one value at a time.
    bits = np.dtype(f"u{x.dtype.itemsize}")
    x_RC = np.ascontiguousarray(x).reshape(rows, -1).view(bits)
    made_CR = np.empty(x_RC.shape[::-1], bits)
    for r in range(0, rows, _TILE):
        for c in range(0, x_RC.shape[1], _TILE):
            made_CR[c : c + _TILE, r : r + _TILE] = x_RC[r : r + _TILE, c : c + _TILE].T
    return made_CR.view(x.dtype).reshape(shape)


def linear(name: str, published: str, out: Shape, into: Shape) -> Entry:
    """A torch Linear [out, in] whose sides split into axes; ours is [*in, *out]."""
    axes = range(len(out) + len(into))
    order = (*axes[len(out) :], *axes[: len(out)])
    stored = (math.prod(out), math.prod(into))
    return Entry(name, (published,), stored, (*out, *into), order)


def plain(
    name: str,
    published: str,
    shape: Shape,
    stored: Shape | None = None,
    *,
    precise: bool = False,
) -> Entry:
    """The same values in the same order, under another shape if `stored` differs."""
    order = tuple(range(len(shape)))
    stored = shape if stored is None else stored
    return Entry(name, (published,), stored, shape, order, precise=precise)


def stack(entry: Entry, published: tuple[str, ...]) -> Entry:
    """`entry` for each of `published`, along a first axis of ours."""
    return dataclasses.replace(entry, published=published, stacked=True)
