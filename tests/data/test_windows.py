"""Windows: what the model reads."""

import chex
import numpy as np
import pytest

from kimi_jax.data.documents import Documents
from kimi_jax.data.packing import PACKINGS
from kimi_jax.data.windows import Pool, pack, padding_batch
from tests.data.stores import BOS, EOD, PAD, memory_store, random_store

SIZES = [7, 2, 3, 19, 5, 40]


def all_of(store) -> Documents:
    return Documents(store.tokens_N, store.offsets_M[:-1], store.offsets_M[1:])


def pool_of(store, length: int, packing: str = "split") -> Pool:
    return Pool((pack(all_of(store), length, packing),), length, PAD)


def test_window_of_the_module_docstring() -> None:
    pool = pool_of(memory_store([b"ab", b"c"]), 6)
    assert pool.windows == 1
    expected = {
        "tokens": np.array([[BOS, 97, 98, EOD, BOS, 99]], np.int32),
        "targets": np.array([[97, 98, EOD, PAD, 99, EOD]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 1, 2, 2]], np.int32),
        "weights": np.array([[1, 1, 1, 0, 1, 1]], np.float32),
    }
    batch = pool.read([0], 1)
    chex.assert_trees_all_equal(batch, expected)
    chex.assert_trees_all_equal_dtypes(batch, expected)


def test_window_inside_a_document_counts_it_as_the_first() -> None:
    pool = pool_of(memory_store([b"abcd", b"e"]), 4)
    batch = pool.read([1], 1)
    assert batch["tokens"][0].tolist() == [100, EOD, BOS, 101]
    assert batch["segment_ids"][0].tolist() == [1, 1, 2, 2]
    assert batch["weights"][0].tolist() == [1, 0, 1, 1]


def test_best_fit_keeps_documents_whole() -> None:
    store = memory_store([b"abc", b"d", b"efg"])
    batch = pool_of(store, 6, "best_fit").read([0, 1], 2)
    assert batch["tokens"].tolist() == [
        [BOS, *b"abc", BOS, *b"d"],
        [BOS, *b"efg", PAD, PAD],
    ]
    assert batch["targets"].tolist() == [
        [*b"abc", EOD, *b"d", EOD],
        [*b"efg", EOD, PAD, PAD],
    ]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0]]
    assert batch["weights"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("length", [1, 3, 7, 12, 100])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_target_is_the_next_token_of_the_same_document(
    packing: str, length: int
) -> None:
    store = random_store(SIZES)
    pool = pool_of(store, length, packing)
    batch = pool.read(range(pool.windows), pool.windows + 1)
    real, learned = batch["segment_ids"] > 0, batch["weights"] > 0
    assert not real[-1].any()
    assert (batch["tokens"][~real] == PAD).all()
    assert (batch["targets"][~learned] == PAD).all() and not (learned & ~real).any()
    same = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    inner = learned[:, :-1] & same
    np.testing.assert_array_equal(
        batch["targets"][:, :-1][inner], batch["tokens"][:, 1:][inner]
    )
    # A document opens a segment; in "split", nothing else does inside a row.
    opens, begins = batch["tokens"][:, 1:] == BOS, ~same & real[:, 1:]
    assert not (opens & ~begins).any()
    assert packing == "best_fit" or (opens == begins).all()
    # All tokens but <bos>, each learned once.
    want = np.sort(store.tokens_N[store.tokens_N != BOS])
    np.testing.assert_array_equal(np.sort(batch["targets"][learned]), want)


def test_pool_numbers_the_windows_of_all_its_members() -> None:
    stores = [random_store(SIZES, seed) for seed in range(3)]
    packed = [pack(all_of(store), 8, "split") for store in stores]
    none = pack(all_of(stores[0]).select(np.zeros(len(SIZES), bool)), 8, "split")
    pool = Pool((none, packed[0], none, packed[1], packed[2]), 8, PAD)
    alone = [Pool((member,), 8, PAD) for member in packed]
    assert pool.windows == sum(single.windows for single in alone)
    rows = [single.read([v], 1) for single in alone for v in range(single.windows)]
    together = pool.read(range(pool.windows), pool.windows)
    for name, array in together.items():
        np.testing.assert_array_equal(array, np.concatenate([r[name] for r in rows]))


@pytest.mark.parametrize("index", [-1, 8])
def test_window_outside_the_pool(index: int) -> None:
    with pytest.raises(IndexError, match=rf"window {index} of 8"):
        pool_of(random_store(SIZES), 10).read([index], 1)
    assert Pool((), 10, PAD).windows == 0


def test_padding_is_inert() -> None:
    batch = padding_batch(2, 5, PAD)
    like = pool_of(random_store(SIZES), 5).read([0, 1], 2)
    chex.assert_trees_all_equal_shapes_and_dtypes(batch, like)
    assert (batch["tokens"] == PAD).all() and (batch["targets"] == PAD).all()
    assert not batch["segment_ids"].any() and not batch["weights"].any()


def test_wide_tokens() -> None:
    store = random_store(SIZES)
    wide = store._replace(tokens_N=store.tokens_N.astype(np.uint32) + 100_000)
    batch = pool_of(wide, 8).read([0], 1)
    assert batch["tokens"].min() >= 100_000 and batch["tokens"].dtype == np.int32
