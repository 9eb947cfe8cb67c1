"""Random orders and draws that can be evaluated at any index, with no state."""

from __future__ import annotations

import math

import numpy as np


def permute(index: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where the shuffled order of `key` puts `index`: a bijection of 0..size-1.

    The indices are laid out in a rectangle that is nearly square. A round shifts each
    row by an amount hashed from its number, or each column likewise: a Feistel network,
    which is a bijection whatever the hash. The few results past `size` go round again
    until they fall inside ("cycle walking"). Time and memory do not grow with `size`.

    Args:
      index: integers in [0, size), [N].
      size: 1 to 2^62.
      key: such as (seed, epoch), 0 or more each; every key is an order of its own, but
        zeros at the end of a key do not count.

    Returns:
      int64 [N].
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = np.random.SeedSequence(key).generate_state(8, np.uint64)

    def shuffle(index: np.ndarray) -> np.ndarray:
        row, column = np.divmod(index, columns)
        for row_key, column_key in keys.reshape(-1, 2):
            column = (column + _hash(row, row_key) % columns) % columns
            row = (row + _hash(column, column_key) % rows) % rows
        return row * columns + column

    index = shuffle(np.asarray(index, np.int64))
    while (outside := index >= size).any():
        index[outside] = shuffle(index[outside])
    return index


def uniform(index: np.ndarray, *key: int) -> np.ndarray:
    """A number in [0, 1] hashed from (key, index), float64 [N], for each index [N]."""
    # A branch of its own, so that draws have nothing to do with the order of that key.
    seeds = np.random.SeedSequence(key, spawn_key=(1,))
    (state,) = seeds.generate_state(1, np.uint64)
    return _hash(np.asarray(index, np.int64), state) / 2.0**63


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Non-negative int64 in which each bit of `values` and `key` moves every bit."""
    # The constants are those of splitmix64's finaliser.
    mixed = values.astype(np.uint64) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
