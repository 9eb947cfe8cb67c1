"""Held-out documents and length strata."""

import numpy as np
import pytest

from kimi_jax.data.documents import by_length, hold_out, stratum_name
from tests.data.stores import BOS, EOD, memory_store, random_store


def test_store_in_memory() -> None:
    store = memory_store([b"ab", b"", b"c"])
    assert store.tokens_N.dtype == np.uint16
    assert store.tokens_N.tolist() == [BOS, 97, 98, EOD, BOS, EOD, BOS, 99, EOD]
    assert store.offsets_M.tolist() == [0, 4, 6, 9] and store.documents == 3
    assert store.digest != memory_store([b"ab", b"", b"d"]).digest


def test_every_document_is_on_one_side_and_the_share_is_right() -> None:
    store = random_store([5] * 4000)
    train, validation = hold_out(store, 0.1, seed=0)
    both = np.sort(np.concatenate([train.start_D, validation.start_D]))
    np.testing.assert_array_equal(both, store.offsets_M[:-1])
    # Binomial: a standard deviation of sqrt(4000 * 0.1 * 0.9) = 19.
    assert abs(len(validation.start_D) - 400) < 5 * 19
    other = hold_out(store, 0.1, seed=1).validation
    assert len(np.intersect1d(other.start_D, validation.start_D)) < 100


def test_appending_moves_no_document() -> None:
    short, long = random_store([5] * 200), random_store([5] * 300)
    before = hold_out(short, 0.1, seed=0).validation.start_D
    after = hold_out(long, 0.1, seed=0).validation.start_D
    assert before.tolist() == after[after < short.offsets_M[-1]].tolist()


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_has_a_document(fraction: float) -> None:
    train, validation = hold_out(random_store([5, 6]), fraction, seed=0)
    assert len(train.start_D) == len(validation.start_D) == 1


def test_a_single_document_is_cut() -> None:
    store = random_store([100])
    train, validation = hold_out(store, 0.1, seed=0)
    assert (train.start_D, train.end_D) == (0, 90)
    assert (validation.start_D, validation.end_D) == (90, 100)
    with pytest.raises(ValueError, match="one document of 10 tokens, too short to"):
        hold_out(random_store([10]), 0.1, seed=0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"expected above 0 and below 1; 0\.05"):
        hold_out(random_store([5, 6]), fraction, seed=0)


def test_strata_by_length() -> None:
    sizes = [3, 4, 9, 10, 2, 500]
    documents, _ = hold_out(random_store([*sizes, 7]), 1e-9, seed=3)
    strata = by_length(documents, (4, 10))
    kept = documents.sizes_D.tolist()
    assert [s.sizes_D.tolist() for s in strata] == [
        [n for n in kept if n < 4],
        [n for n in kept if 4 <= n < 10],
        [n for n in kept if n >= 10],
    ]
    assert [s.sizes_D.tolist() for s in by_length(documents, ())] == [kept]
    assert [stratum_name((4, 4096), s) for s in range(3)] == [
        "0 to 3 tokens",
        "4 to 4,095 tokens",
        "4,096 tokens and more",
    ]
    assert stratum_name((), 0) == "all lengths"
