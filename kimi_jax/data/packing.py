"""Which pieces of which documents share a window.

"split" joins the documents and cuts every T tokens, so that no position is lost:

    stream      <bos> a b <eod> <bos> c <eod>        T = 4
    window 0    <bos> a b <eod>                      (the last one predicts nothing)
    window 1    <bos> c                              (the last document's <eod> is a
                                                      target only)

"best_fit" keeps documents whole: a document of n tokens is n - 1 inputs and targets;
one with more than T is cut into pieces of T and a rest. Pieces, longest first, go into
the fullest window with room for them (best-fit decreasing).

Either way each token after <bos> is a target exactly once an epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kimi_jax.data.documents import Documents


class Pieces(NamedTuple):
    """V windows made of P pieces: window v holds pieces first_V[v]:first_V[v + 1].

    Piece p reads inputs_P[p] tokens from start_P[p] on. Its first targets_P[p] inputs,
    all of them or all but one, predict the token after them.
    """

    start_P: np.ndarray  # int64, place in the store
    inputs_P: np.ndarray  # int32
    targets_P: np.ndarray  # int32
    first_V: np.ndarray  # int64, [windows + 1]

    @property
    def windows(self) -> int:
        return len(self.first_V) - 1

    def padding(self, length: int) -> float:
        """Share of the positions of windows of `length` that hold no input."""
        filled = int(self.inputs_P.sum(dtype=np.int64))
        return 1 - filled / (self.windows * length) if self.windows else 0.0


def split(documents: Documents, length: int) -> Pieces:
    """Join and cut every `length` tokens; the last window may be partly padding."""
    sizes_D = documents.sizes_D
    end_D = np.cumsum(sizes_D)
    begin_D = end_D - sizes_D
    # The very last token is nobody's input.
    inputs = int(sizes_D.sum()) - 1
    windows = max(0, -(-inputs // length))
    at_V = np.arange(windows) * length
    at_P = np.union1d(begin_D[begin_D < inputs], at_V)
    until_P = np.append(at_P[1:], max(0, inputs))[: len(at_P)]
    owner_P = np.searchsorted(begin_D, at_P, side="right") - 1
    inputs_P = until_P - at_P
    return Pieces(
        documents.start_D[owner_P] + at_P - begin_D[owner_P],
        inputs_P.astype(np.int32),
        (inputs_P - (until_P == end_D[owner_P])).astype(np.int32),
        np.append(np.searchsorted(at_P, at_V), len(at_P)),
    )


def best_fit(documents: Documents, length: int) -> Pieces:
    """Whole documents, those that need it cut; windows in which little room is left."""
    inputs_D = documents.sizes_D - 1
    pieces_D = -(-inputs_D // length)
    owner_P = np.repeat(np.arange(len(inputs_D)), pieces_D)
    nth_P = np.arange(len(owner_P)) - np.repeat(
        np.cumsum(pieces_D) - pieces_D, pieces_D
    )
    start_P = documents.start_D[owner_P] + nth_P * length
    inputs_P = np.minimum(inputs_D[owner_P] - nth_P * length, length).astype(np.int32)
    window_P = best_fit_decreasing(inputs_P, length)
    order_P = np.lexsort((start_P, window_P))
    inputs_P = inputs_P[order_P]
    return Pieces(
        start_P[order_P],
        inputs_P,
        inputs_P,
        np.append(0, np.cumsum(np.bincount(window_P))),
    )


def best_fit_decreasing(size_P: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64 [P]: bins 0, 1, ... hold at most `capacity` each.

    Items of one size are placed together: best fit fills a bin with as many of them as
    it takes before it turns to the next, so what remains to be found, for each size, is
    the room that is smallest and large enough. Bins are kept by the room they have.

    Args:
      size_P: 1 <= size <= capacity.
    """
    order_P = np.argsort(-size_P, kind="stable")
    bin_P = np.empty(len(size_P), np.int64)
    rooms: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    has_room = bytearray(capacity + 1)
    placed = bins = 0

    def put(room: int, bins_B: np.ndarray) -> None:
        if room and len(bins_B):
            rooms[room].append(bins_B)
            has_room[room] = True

    def take(room: int, most: int) -> np.ndarray:
        bins_B = rooms[room].pop()
        if len(bins_B) > most:
            rooms[room].append(bins_B[most:])
        has_room[room] = bool(rooms[room])
        return bins_B[:most]

    for size, count in _falling_counts(size_P):
        while count:
            room = has_room.find(True, size)
            fresh = room < 0
            room = capacity if fresh else room
            each = room // size
            needed = -(-count // each)
            if fresh:
                bins_B = np.arange(bins, bins + needed)
                bins += needed
            else:
                bins_B = take(room, needed)
            now = min(count, each * len(bins_B))
            bin_P[order_P[placed : placed + now]] = np.repeat(bins_B, each)[:now]
            full, rest = divmod(now, each)
            put(room - each * size, bins_B[:full])
            put(room - rest * size, bins_B[full:])
            placed += now
            count -= now
    return bin_P


def _falling_counts(size_P: np.ndarray) -> Iterator[tuple[int, int]]:
    sizes, counts = np.unique(size_P, return_counts=True)
    return zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True)


PACKINGS = {"split": split, "best_fit": best_fit}
