"""Batches by step: pure, resumable, complete."""

import sys
import threading
from pathlib import Path

import chex
import numpy as np
import pytest

from kimi_jax.data.build_store import build_store
from kimi_jax.data.loader import (
    EvalBatches,
    TrainBatches,
    iterate,
    load_data,
    split_tokens,
    unigram_entropy,
)
from kimi_jax.data.split import held_out
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.windows import join_documents, num_windows, packed_window

RNG = np.random.default_rng(0)
DOCUMENTS = [
    RNG.integers(0, 256, size, np.uint8).tobytes() for size in [90, 7, 150, 48]
]
STREAM_N = join_documents(DOCUMENTS, ByteTokenizer())
LENGTH = 16  # 19 windows, the last one partly padding


def train_batches(batch_size: int = 4, seed: int = 0) -> TrainBatches:
    return TrainBatches(STREAM_N, batch_size, LENGTH, seed)


def test_epoch_reads_every_window_once_in_another_order_each_time() -> None:
    source = train_batches(batch_size=1)
    assert source.num_windows == 19
    rows = [source[step]["tokens"].tobytes() for step in range(3 * 19)]
    in_order = [
        packed_window(STREAM_N, i, LENGTH)["tokens"].tobytes() for i in range(19)
    ]
    epochs = [rows[:19], rows[19:38], rows[38:]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(in_order)
    assert in_order != epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("batch_size", [2, 4, 19])
def test_rows_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    single, batched = train_batches(1), train_batches(batch_size)
    rows = [single[step]["tokens"][0] for step in range(10 * batch_size)]
    for step in range(10):  # several epochs, with batches across their border
        batch = batched[step]
        chex.assert_shape(list(batch.values()), (batch_size, LENGTH))
        np.testing.assert_array_equal(
            batch["tokens"], rows[step * batch_size : (step + 1) * batch_size]
        )


def test_batch_is_a_pure_function_of_seed_and_step() -> None:
    source, again, other = train_batches(), train_batches(), train_batches(seed=1)
    forward = [source[step] for step in range(12)]
    backward = [again[step] for step in reversed(range(12))][::-1]
    chex.assert_trees_all_equal(forward, backward)
    assert any((a["tokens"] != other[i]["tokens"]).any() for i, a in enumerate(forward))
    chex.assert_shape(source[10**15]["tokens"], (4, LENGTH))


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_iteration_from_any_step_continues_the_run(read_ahead: int) -> None:
    source = train_batches()
    batches = list(iterate(source, 7, 20, read_ahead=read_ahead))
    chex.assert_trees_all_equal(batches, [source[step] for step in range(7, 20)])
    assert list(iterate(source, 5, 5, read_ahead=read_ahead)) == []


def test_iteration_without_grain_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = train_batches()
    with_grain = list(iterate(source, 0, 6))
    monkeypatch.setitem(sys.modules, "grain", None)
    chex.assert_trees_all_equal(list(iterate(source, 0, 6)), with_grain)


def test_read_ahead_works_in_another_thread_and_reports_its_errors() -> None:
    class Recording:
        def __init__(self) -> None:
            self.threads: list[str] = []

        def __getitem__(self, step: int) -> dict[str, np.ndarray]:
            self.threads.append(threading.current_thread().name)
            if step == 3:
                raise ValueError("no step 3")
            return {"tokens": np.full(1, step)}

    source = Recording()
    batches = iterate(source, 0, 10)
    assert [int(next(batches)["tokens"][0]) for _ in range(3)] == [0, 1, 2]
    assert threading.current_thread().name not in source.threads
    with pytest.raises(ValueError, match="no step 3"):
        next(batches)


def test_abandoned_iteration_leaves_no_thread() -> None:
    before = threading.active_count()
    batches = iterate(train_batches(), 0, 10**9)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() <= before + 1


def test_evaluation_reads_all_in_order_and_fills_the_last_batch() -> None:
    source = EvalBatches(STREAM_N, 4, LENGTH, max_batches=100)
    assert len(source) == 5
    batches = list(iterate(source, 0, len(source)))
    joined = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    chex.assert_shape(list(joined.values()), (20, LENGTH))
    for row in range(19):
        expected = packed_window(STREAM_N, row, LENGTH)
        chex.assert_trees_all_equal({n: a[row] for n, a in joined.items()}, expected)
    assert not joined["segment_ids"][19].any() and not joined["weights"][19].any()
    # All bytes and one <eod> a document, each exactly once.
    assert joined["weights"].sum() == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)


def test_evaluation_with_a_limit_spreads_over_the_text() -> None:
    source = EvalBatches(STREAM_N, 2, LENGTH, max_batches=3)
    assert len(source) == 3
    assert source.windows.tolist() == [0, 3, 6, 9, 12, 15]
    assert EvalBatches(STREAM_N, 19, LENGTH, max_batches=1).windows.tolist() == [
        *range(19)
    ]


def test_evaluation_of_less_than_a_batch() -> None:
    source = EvalBatches(STREAM_N, 32, LENGTH, max_batches=2)
    assert len(source) == 1
    assert (source[0]["segment_ids"].any(axis=1)).sum() == 19


def test_indices_out_of_range() -> None:
    with pytest.raises(IndexError, match="step -1"):
        train_batches()[-1]
    with pytest.raises(IndexError, match="batch 5 of 5"):
        EvalBatches(STREAM_N, 4, LENGTH, 100)[5]


def test_batch_larger_than_the_text_says_what_to_change() -> None:
    with pytest.raises(
        ValueError,
        match=r"batch_size=20 .* 303 training tokens fill only 19 rows; "
        r"lower config\.train\.batch_size to 19, lower config\.train\.seq_len, or add",
    ):
        train_batches(batch_size=20)


@pytest.mark.parametrize("sizes", [(0, 16, 1), (4, 0, 1), (4, 16, 0), (-1, 16, 1)])
def test_sizes_below_one(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 or more each"):
        EvalBatches(STREAM_N, *sizes)
    if sizes[2]:
        with pytest.raises(ValueError, match="expected 1 or more each"):
            TrainBatches(STREAM_N, *sizes[:2], seed=0)


def test_negative_seed() -> None:
    with pytest.raises(ValueError, match="seed=-1, expected 0 or more"):
        train_batches(seed=-1)


def test_unigram_entropy_counts_bytes_only() -> None:
    tokenizer = ByteTokenizer()
    bytes_W = tokenizer.bytes_per_token
    assert unigram_entropy(join_documents([b"aaaa", b"a"], tokenizer), bytes_W) == 0
    uniform_N = join_documents([bytes(range(256))] * 3, tokenizer)
    assert unigram_entropy(uniform_N, bytes_W) == pytest.approx(8, abs=1e-12)
    # p = (3/4, 1/4): 0.811278...
    stream_N = join_documents([b"aaab"], tokenizer)
    assert unigram_entropy(stream_N, bytes_W) == pytest.approx(
        2 - 0.75 * np.log2(3), abs=1e-12
    )
    # Tokens of three bytes carry a third of the bits a byte.
    assert unigram_entropy(stream_N, 3 * bytes_W) == pytest.approx(
        (2 - 0.75 * np.log2(3)) / 3, abs=1e-12
    )


def test_load_data_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"To be, or not to be. " * 100)
    store = build_store(str(tmp_path / "text.txt"), ByteTokenizer(), tmp_path / "s")
    data = load_data(
        store,
        ByteTokenizer(),
        validation_fraction=0.1,
        seed=0,
        batch_size=4,
        length=LENGTH,
        steps=60,
        eval_batches=2,
    )
    assert data.summary == {
        "source": str(tmp_path / "text.txt"),
        "documents": 1,
        "skipped": 0,
        "train_tokens": 1892,
        "validation_tokens": 212,
        "windows": num_windows(data.train.stream_N, LENGTH),
        "epochs": pytest.approx(60 * 4 / 119),
        "unigram_bits_per_byte": pytest.approx(3.0, abs=0.5),
    }
    chex.assert_shape(data.train[0]["tokens"], (4, LENGTH))
    assert len(data.validation) == 2
    text = data.tokenizer.decode(data.validation[0]["tokens"][0])
    assert text in "To be, or not to be. " * 2


def test_whole_documents_are_held_out_in_order(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_bytes(b"%d" % i)
    store = build_store(str(tmp_path), ByteTokenizer(), tmp_path / ".store")
    sides = split_tokens(store, 0.1, seed=0)
    held = held_out(200, 0.1, seed=0)
    for side, mask in zip(sides, (~held, held), strict=True):
        texts = [b"%d" % i for i in np.flatnonzero(mask)]
        np.testing.assert_array_equal(side, join_documents(texts, ByteTokenizer()))


def test_a_single_document_gives_its_end(tmp_path: Path) -> None:
    text = bytes(range(1, 101))
    (tmp_path / "a.txt").write_bytes(text)
    store = build_store(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "a")
    for side, part in zip(
        split_tokens(store, 0.1, seed=0), (text[:90], text[90:]), strict=True
    ):
        np.testing.assert_array_equal(side, join_documents([part], ByteTokenizer()))
    (tmp_path / "b.txt").write_bytes(b"text")
    store = build_store(str(tmp_path / "b.txt"), ByteTokenizer(), tmp_path / "b")
    with pytest.raises(ValueError, match="one document of 4 tokens, too short"):
        split_tokens(store, 0.1, seed=0)


def test_default_corpus_has_the_expected_entropy(tmp_path: Path) -> None:
    data = load_data(
        build_store("", ByteTokenizer(), tmp_path / "store"),
        ByteTokenizer(),
        validation_fraction=0.05,
        seed=0,
        batch_size=8,
        length=256,
        steps=1,
        eval_batches=1,
    )
    assert data.summary["unigram_bits_per_byte"] == pytest.approx(4.87, abs=0.05)
    assert data.summary["train_tokens"] == 4_840_568
