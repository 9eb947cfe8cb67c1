"""Packing against slow, obvious references."""

import numpy as np
import pytest

from kimi_jax.data.documents import Documents
from kimi_jax.data.packing import PACKINGS, Pieces, best_fit, best_fit_decreasing, split
from tests.data.stores import counting_documents

RNG = np.random.default_rng(0)
SIZES = [2, 9, 3, 30, 5, 5, 17, 2, 2, 8, 64, 7]


def windows_of(pieces: Pieces) -> list[list[tuple[int, int, int]]]:
    columns = zip(pieces.start_P, pieces.inputs_P, pieces.targets_P, strict=True)
    rows = [tuple(map(int, row)) for row in columns]
    return [
        rows[a:b] for a, b in zip(pieces.first_V[:-1], pieces.first_V[1:], strict=True)
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 12, 29, 30, 63, 64, 200])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_is_a_target_once(packing: str, length: int) -> None:
    documents = counting_documents(SIZES)
    pieces = PACKINGS[packing](documents, length)
    windows = windows_of(pieces)
    assert all(0 < sum(n for _, n, _ in window) <= length for window in windows)
    targets = [start + 1 + i for w in windows for start, _, n in w for i in range(n)]
    opening = set(documents.start_D.tolist())
    assert sorted(targets) == [n for n in range(sum(SIZES)) if n not in opening]
    # Every input is read once: all tokens, or all but the last of each document.
    inputs = [start + i for w in windows for start, n, _ in w for i in range(n)]
    unread = documents.end_D - 1 if packing == "best_fit" else [sum(SIZES) - 1]
    assert sorted(inputs) == sorted(set(range(sum(SIZES))) - set(map(int, unread)))
    filled = sum(pieces.inputs_P) / (len(windows) * length)
    assert pieces.padding(length) == pytest.approx(1 - filled, abs=1e-12)


@pytest.mark.parametrize("length", [1, 3, 7, 12, 200])
def test_split_is_the_stream_cut_at_every_length(length: int) -> None:
    # Not neighbours in the store: every second document.
    documents = counting_documents(SIZES).select(np.arange(len(SIZES)) % 2 == 0)
    stream = [
        (n, n == end - 1)
        for start, end in zip(documents.start_D, documents.end_D, strict=True)
        for n in range(start, end)
    ]
    windows = windows_of(split(documents, length))
    assert len(windows) == -(-(len(stream) - 1) // length)
    for v, window in enumerate(windows):
        want = stream[:-1][v * length : (v + 1) * length]
        got = [
            (start + i, i >= targets)
            for start, inputs, targets in window
            for i in range(inputs)
        ]
        assert got == want


@pytest.mark.parametrize("length", [7, 16, 31])
def test_best_fit_cuts_only_what_cannot_fit(length: int) -> None:
    documents = counting_documents(SIZES)
    starts = [start for w in windows_of(best_fit(documents, length)) for start, *_ in w]
    want = [
        int(start) + i
        for start, size in zip(documents.start_D, SIZES, strict=True)
        for i in range(0, size - 1, length)
    ]
    assert sorted(starts) == want


def naive_best_fit_decreasing(sizes, capacity: int) -> list[int]:
    """Room left in each bin."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, bin) for bin, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return rooms


@pytest.mark.parametrize("capacity", [1, 2, 5, 16, 64, 1000])
def test_best_fit_decreasing_is_that(capacity: int) -> None:
    for trial in range(10):
        largest = [capacity, max(1, capacity // 2), max(1, capacity // 5)][trial % 3]
        size_P = RNG.integers(1, largest + 1, RNG.integers(1, 200))
        bin_P = best_fit_decreasing(size_P, capacity)
        rooms = capacity - np.bincount(bin_P, weights=size_P).astype(int)
        assert sorted(rooms) == sorted(naive_best_fit_decreasing(size_P, capacity))
        again = best_fit_decreasing(size_P, capacity)
        np.testing.assert_array_equal(again, bin_P)


def test_best_fit_leaves_little_room() -> None:
    sizes = RNG.lognormal(5, 1, 20_000).astype(int) + 2
    documents = counting_documents(sizes)
    assert best_fit(documents, 1024).padding(1024) < 0.001


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_documents_make_no_windows(packing: str) -> None:
    empty = np.zeros(0, np.int64)
    documents = Documents(np.zeros(0, np.uint16), empty, empty)
    for length in (1, 8):
        pieces = PACKINGS[packing](documents, length)
        assert pieces.windows == 0 and pieces.padding(length) == 0.0
