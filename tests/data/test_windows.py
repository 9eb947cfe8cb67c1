"""Packed windows and the permutation that orders an epoch."""

import chex
import numpy as np
import pytest

from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.windows import (
    join_documents,
    num_windows,
    packed_window,
    padding_window,
    permute,
)

PAD, BOS, EOD = ByteTokenizer.pad, ByteTokenizer.bos, ByteTokenizer.eod
DOCUMENTS = [b"hello", b"", b"x", b"a longer document", b"end"]


def stream() -> np.ndarray:
    return join_documents(DOCUMENTS, ByteTokenizer())


def test_documents_are_joined_with_their_marks() -> None:
    stream_N = join_documents([b"ab", b"", b"c"], ByteTokenizer())
    assert stream_N.dtype == np.uint16
    assert stream_N.tolist() == [BOS, 97, 98, EOD, BOS, EOD, BOS, 99, EOD]


def test_window_of_the_module_docstring() -> None:
    stream_N = join_documents([b"ab", b"c"], ByteTokenizer())
    assert num_windows(stream_N, 6) == 1
    expected = {
        "tokens": np.array([BOS, 97, 98, EOD, BOS, 99], np.int32),
        "targets": np.array([97, 98, EOD, BOS, 99, EOD], np.int32),
        "segment_ids": np.array([1, 1, 1, 1, 2, 2], np.int32),
        "weights": np.array([1, 1, 1, 0, 1, 1], np.float32),
    }
    window = packed_window(stream_N, 0, 6)
    chex.assert_trees_all_equal(window, expected)
    chex.assert_trees_all_equal_dtypes(window, expected)


def test_window_inside_a_document_counts_it_as_the_first() -> None:
    stream_N = join_documents([b"abcd", b"e"], ByteTokenizer())
    window = packed_window(stream_N, 1, 4)
    assert window["tokens"].tolist() == [100, EOD, BOS, 101]
    assert window["segment_ids"].tolist() == [1, 1, 2, 2]
    assert window["weights"].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12, 38, 39, 100])
def test_every_token_is_a_target_once(length: int) -> None:
    stream_N = stream()
    windows = [
        packed_window(stream_N, index, length)
        for index in range(num_windows(stream_N, length))
    ]
    joined = {name: np.concatenate([w[name] for w in windows]) for name in windows[0]}
    used = joined["segment_ids"] > 0
    np.testing.assert_array_equal(joined["tokens"][used], stream_N[:-1])
    np.testing.assert_array_equal(joined["targets"][used], stream_N[1:])
    # Every byte and every <eod> is learned; no document has to guess the next <bos>.
    np.testing.assert_array_equal(joined["weights"][used], stream_N[1:] != BOS)
    # Padding is at the very end, is less than a window, and weighs nothing.
    assert used.argmin() in (0, used.sum()) and (~used).sum() < length
    assert not joined["weights"][~used].any()
    assert (joined["tokens"][~used] == PAD).all()


@pytest.mark.parametrize("length", [3, 7, 12, 100])
def test_segments_are_the_documents(length: int) -> None:
    stream_N = stream()
    owner_N = np.repeat(
        np.arange(len(DOCUMENTS)), [len(text) + 2 for text in DOCUMENTS]
    )
    for index in range(num_windows(stream_N, length)):
        window = packed_window(stream_N, index, length)
        owner_T = owner_N[:-1][index * length :][:length]
        valid = len(owner_T)
        np.testing.assert_array_equal(
            window["segment_ids"][:valid], owner_T - owner_T[0] + 1
        )
        crosses_T = owner_N[1:][index * length :][:length] != owner_T
        np.testing.assert_array_equal(window["weights"][:valid], ~crosses_T)


@pytest.mark.parametrize("index", [-1, 4])
def test_window_outside_the_stream(index: int) -> None:
    with pytest.raises(IndexError, match=rf"window {index} of 4"):
        packed_window(stream(), index, 10)


def test_padding_window_is_inert() -> None:
    window = padding_window(5)
    chex.assert_trees_all_equal_shapes_and_dtypes(window, packed_window(stream(), 0, 5))
    assert (window["tokens"] == PAD).all() and (window["targets"] == PAD).all()
    assert not window["segment_ids"].any() and not window["weights"].any()


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4096, 10_007])
def test_permutation_is_a_bijection(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (2**63, 10**6)]:
        order = permute(np.arange(size), size, seed, epoch)
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_permutation_does_not_depend_on_what_is_asked_with_it() -> None:
    order = permute(np.arange(1000), 1000, seed=5, epoch=2)
    for index in (0, 1, 500, 999):
        assert permute(np.array([index]), 1000, seed=5, epoch=2) == order[index]


def test_permutation_of_a_huge_range_is_spread_and_repeats_nothing() -> None:
    size = 2**62
    index = np.r_[np.arange(500), size - 1 - np.arange(500)]
    order = permute(index, size, seed=0, epoch=0)
    assert len(np.unique(order)) == 1000
    assert order.min() >= 0 and order.max() < size
    # Uniform on [0, 1): mean 1/2 with a standard error of 0.29 / sqrt(1000).
    assert abs((order / size).mean() - 0.5) < 4 * 0.29 / 1000**0.5


def test_orders_look_random() -> None:
    size, orders = 50, 2000
    drawn = np.array([permute(np.arange(size), size, 0, e) for e in range(orders)])
    # Where index i lands is uniform, for every i: chi-square with 49 degrees.
    counts = np.array([np.bincount(drawn[:, i], minlength=size) for i in range(size)])
    chi_square = ((counts - orders / size) ** 2 / (orders / size)).sum(axis=1)
    assert chi_square.max() < 49 + 5 * (2 * 49) ** 0.5
    # Neighbours are not kept: a step from i to i + 1 is uniform over the other 49.
    steps = np.diff(drawn, axis=1) % size
    counts = np.bincount(steps.ravel(), minlength=size)[1:]
    expected = steps.size / (size - 1)
    assert np.abs(counts - expected).max() < 5 * expected**0.5
    # Two epochs share one position on average, as independent orders do.
    shared = (drawn[1:] == drawn[:-1]).sum(axis=1)
    assert abs(shared.mean() - 1) < 5 / orders**0.5


def test_order_is_fixed_for_ever() -> None:
    # A change of these numbers would change what every resumed run reads next.
    expected = [663, 993, 462, 881, 33, 532, 780, 327]
    assert permute(np.arange(8), 1000, seed=7, epoch=3).tolist() == expected
