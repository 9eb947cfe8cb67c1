"""Windows of packed text, each a pure function of (seed, epoch, index).

Documents are joined into one stream, each as <bos> bytes <eod>, and the stream is cut
every T tokens ("concatenate and split"). A window reads T + 1 tokens, so that every
token is a target exactly once an epoch. `segment_ids` tell the documents of a window
apart; the model resets its state and masks its attention by them.

    stream      <bos> a b <eod> <bos> c <eod>        T = 6
    tokens      <bos> a   b     <eod> <bos> c
    targets     a     b   <eod> <bos> c     <eod>
    segment_ids 1     1   1     1     2     2
    weights     1     1   1     0     1     1

No state has to be saved to resume, on any number of hosts: the order of an epoch is a
permutation that can be evaluated at any index (`permute`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kimi_jax.data.tokenizer import ByteTokenizer

Batch = dict[str, np.ndarray]


def join_documents(documents: Sequence[bytes], tokenizer: ByteTokenizer) -> np.ndarray:
    """The stream: <bos> bytes <eod> of each of `documents`, uint16 [N].

    <bos> occurs nowhere else, so the stream by itself tells where documents begin.
    """
    stream_N = np.empty(sum(len(text) + 2 for text in documents), np.uint16)
    start = 0
    for text in documents:
        end = start + len(text) + 2
        stream_N[start] = tokenizer.bos
        stream_N[start + 1 : end - 1] = tokenizer.encode(text)
        stream_N[end - 1] = tokenizer.eod
        start = end
    return stream_N


def num_windows(stream_N: np.ndarray, length: int) -> int:
    """Windows of `length` targets in the stream; the last may be partly padding."""
    return -(-(len(stream_N) - 1) // length)


def packed_window(stream_N: np.ndarray, index: int, length: int) -> Batch:
    """Window `index` of the stream, in reading order.

    Args:
      index: 0 <= index < num_windows(stream_N, length).
      length: T, tokens a window.

    Returns:
      tokens [T] int32, the inputs; padding is <pad>.
      targets [T] int32, the token after each input.
      segment_ids [T] int32: documents counted from 1 within the window; 0 is padding,
        which only the end of the last window has.
      weights [T] float32: 1, or 0 where the target opens the next document or the
        input is padding.

    Raises:
      IndexError: there is no such window.
    """
    available = num_windows(stream_N, length)
    if not 0 <= index < available:
        raise IndexError(f"window {index} of {available}; indices count from 0")
    window = padding_window(length)
    read = stream_N[index * length : (index + 1) * length + 1]
    inputs, targets = read[:-1], read[1:]
    opens = inputs == ByteTokenizer.bos
    window["tokens"][: len(inputs)] = inputs
    window["targets"][: len(inputs)] = targets
    # A document that began in an earlier window counts as the first of this one.
    window["segment_ids"][: len(inputs)] = np.cumsum(opens) + (not opens[0])
    window["weights"][: len(inputs)] = targets != ByteTokenizer.bos
    return window


def padding_window(length: int) -> Batch:
    """A window without text: <pad>, segment 0 and weight 0 everywhere."""
    return {
        "tokens": np.full(length, ByteTokenizer.pad, np.int32),
        "targets": np.full(length, ByteTokenizer.pad, np.int32),
        "segment_ids": np.zeros(length, np.int32),
        "weights": np.zeros(length, np.float32),
    }


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where the shuffled order of `epoch` puts `index`: a bijection of 0..size-1.

    The indices are laid out in a rectangle that is nearly square. A round shifts each
    row by an amount hashed from its number, or each column likewise: a Feistel network,
    which is a bijection whatever the hash. The few results past `size` go round again
    until they fall inside ("cycle walking"). Time and memory do not grow with `size`.

    Args:
      index: integers in [0, size), [N].
      size: 1 to 2^62.
      seed, epoch: 0 or more; each pair is an order of its own.

    Returns:
      int64 [N].
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64)

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


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Non-negative int64 in which each bit of `values` and `key` moves every bit."""
    # The constants are those of splitmix64's finaliser.
    mixed = values.astype(np.uint64) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
