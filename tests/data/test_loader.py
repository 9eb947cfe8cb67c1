"""Batches by step: pure, resumable, complete, the same for any number of readers."""

import collections
import re
import sys
import threading
import time
from pathlib import Path

import chex
import numpy as np
import pytest

from kimi_jax.data import statistics
from kimi_jax.data.documents import hold_out
from kimi_jax.data.loader import (
    Data,
    EvalBatches,
    Reader,
    TrainBatches,
    iterate,
    load_data,
    make_data,
    unigram_entropy,
)
from kimi_jax.data.mixture import combine, make_schedule
from kimi_jax.data.permutation import permute
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.windows import Pool, pack
from tests import tiny
from tests.data.stores import PAD, MemoryStore, memory_store, random_store

LENGTH = 16
STORE = random_store([92, 9, 152, 50])
DOCUMENTS = hold_out(STORE, 1e-9, seed=0).train  # the longest is held out
ALL = DOCUMENTS._replace(start_D=STORE.offsets_M[:-1], end_D=STORE.offsets_M[1:])
POOL = Pool((pack(ALL, LENGTH, "split"),), LENGTH, PAD)  # 19 windows
IN_ORDER = POOL.read(range(19), 19)["tokens"]


def train_batches(batch_size: int = 4, seed: int = 0) -> TrainBatches:
    schedule = make_schedule(combine([], []), 1000)
    return TrainBatches((POOL,), schedule, batch_size, seed)


def eval_batches(batch_size: int, max_batches: int) -> EvalBatches:
    return EvalBatches((ALL,), batch_size, LENGTH, max_batches, PAD)


RNG = np.random.default_rng(0)
SOURCES = [
    random_store([*RNG.integers(2, top, count), *range(4, 20)], seed)
    for seed, (top, count) in enumerate([(30, 60), (90, 40), (200, 8)])
]
MIXED = (
    "data.packing=best_fit",
    "data.mixture=((0.0, 0.6, 0.3, 0.1), (0.5, 0.2, 0.4, 0.4))",
    "data.strata=12",
    "data.strata_mixture=((0.0, 1, 3), (0.3, 3, 1))",
    "data.validation_fraction=0.1",
    f"train.seq_len={LENGTH}",
    "train.steps=64",
    "train.batch_size=16",
)


def mixed(*overrides: str, stores: list[MemoryStore] = SOURCES) -> Data:
    return make_data(stores, ByteTokenizer(), tiny.make(*MIXED, *overrides))


def test_epoch_reads_every_window_once_in_another_order_each_time() -> None:
    source = train_batches(batch_size=1)
    assert source.windows == 19
    rows = [source[step]["tokens"].tobytes() for step in range(3 * 19)]
    in_order = [row.tobytes() for row in IN_ORDER]
    epochs = [rows[:19], rows[19:38], rows[38:]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(in_order)
    assert in_order != epochs[0] != epochs[1] != epochs[2]
    # A change of this order would change what every resumed run reads next.
    for epoch, row_bytes in enumerate(epochs):
        order = permute(np.arange(19), 19, 0, epoch)
        assert row_bytes == [in_order[v] for v in order]


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


def test_mixed_batches_equal_a_walk_from_the_first_row() -> None:
    """Slow reference: the k-th row of a part is its next window, epoch after epoch."""
    data = mixed()
    source, taken = data.train, collections.Counter[int]()
    assert len(source.parts) == 6
    for step in range(80):  # beyond the planned end
        batch = source[step]
        for row in range(16):
            number = step * 16 + row
            block, place = divmod(number, source.schedule.block_rows)
            part = int(source.schedule.draw(block, 0)[0][place])
            pool = source.parts[part]
            epoch, k = divmod(taken[part], pool.windows)
            window = permute(np.array([k]), pool.windows, 0, epoch, part)
            taken[part] += 1
            expected = pool.read(window, 1)
            for name, array in batch.items():
                np.testing.assert_array_equal(array[row], expected[name][0])
    planned = source.schedule.planned(80 * 16)
    off = [taken[part] - planned[part] for part in range(6)]
    # One row a phase and part, and the block that the walk ends in.
    assert np.abs(off).max() < 3 + 0.05 * source.schedule.block_rows
    assert all(taken[part] > pool.windows for part, pool in enumerate(source.parts))


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_readers_together_read_the_batch(readers: int) -> None:
    data = mixed()
    for source, steps in (
        (data.train, (0, 5, 31, 32, 10**6)),
        (data.validation, range(len(data.validation))),
    ):
        for step in steps:
            shares = [Reader(source, i, readers)[step] for i in range(readers)]
            chex.assert_shape(shares[0]["tokens"], (16 // readers, LENGTH))
            joined = {n: np.concatenate([s[n] for s in shares]) for n in shares[0]}
            chex.assert_trees_all_equal(joined, source[step])
            # A reader that starts here, in a process of its own, reads the same.
            fresh = mixed().train if source is data.train else mixed().validation
            chex.assert_trees_all_equal(Reader(fresh, 0, readers)[step], shares[0])


def test_readers_iterate_with_read_ahead() -> None:
    source = mixed().train
    for reader in range(2):
        mine = Reader(source, reader, 2)
        got = list(iterate(mine, 3, 9))
        chex.assert_trees_all_equal(got, [mine[step] for step in range(3, 9)])


def test_readers_that_do_not_fit() -> None:
    source = mixed().train
    with pytest.raises(ValueError, match="to a multiple of 3"):
        source.rows(0, 0, 3)
    for reader in (-1, 2):
        with pytest.raises(ValueError, match=f"reader {reader} of 2; readers count"):
            source.rows(0, reader, 2)


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
    source = eval_batches(4, 100)
    assert len(source) == 5
    batches = list(iterate(source, 0, len(source)))
    joined = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    chex.assert_shape(list(joined.values()), (20, LENGTH))
    np.testing.assert_array_equal(joined["tokens"][:19], IN_ORDER)
    assert not joined["segment_ids"][19].any() and not joined["weights"][19].any()
    # All tokens but one <bos> a document, each exactly once.
    assert joined["weights"].sum() == len(STORE.tokens_N) - STORE.documents


def test_evaluation_with_a_limit_spreads_over_the_text() -> None:
    source = eval_batches(2, 3)
    assert len(source) == 3
    assert source.windows.tolist() == [0, 3, 6, 9, 12, 15]
    assert eval_batches(19, 1).windows.tolist() == [*range(19)]


def test_evaluation_of_less_than_a_batch() -> None:
    source = eval_batches(32, 2)
    assert len(source) == 1
    assert (source[0]["segment_ids"].any(axis=1)).sum() == 19


def test_evaluation_at_a_multiple_of_the_length() -> None:
    source = mixed("train.eval_batches=100").validation
    longer = source.at(4 * LENGTH, batch_size=2)
    chex.assert_shape(longer[0]["tokens"], (2, 4 * LENGTH))
    sums = [
        sum(batch["weights"].sum() for batch in iterate(each, 0, len(each)))
        for each in (source, longer)
    ]
    # Every held-out token but <bos>, of all sources, however long the windows are.
    held_out = sum(hold_out(s, 0.1, 0).validation.sizes_D.sum() - len(
        hold_out(s, 0.1, 0).validation.start_D) for s in SOURCES)  # fmt: skip
    assert sums == [held_out, held_out]


def test_indices_out_of_range() -> None:
    with pytest.raises(IndexError, match="step -1"):
        train_batches()[-1]
    with pytest.raises(IndexError, match="batch 5 of 5"):
        eval_batches(4, 100)[5]


def test_batch_larger_than_the_text_says_what_to_change() -> None:
    with pytest.raises(
        ValueError,
        match=r"batch_size=20 .* training text fills only 19 rows; "
        r"lower config\.train\.batch_size to 19, lower config\.train\.seq_len, or add",
    ):
        train_batches(batch_size=20)


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (-1, 1)])
def test_sizes_below_one(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 or more each"):
        eval_batches(*sizes)
    if sizes[1]:
        with pytest.raises(ValueError, match="expected 1 or more each"):
            train_batches(sizes[0])


def test_negative_seed() -> None:
    with pytest.raises(ValueError, match="seed=-1, expected 0 or more"):
        train_batches(seed=-1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.mixture=((0.0, 1, 1),)", "has 2 weights in a row for 3 sources"),
        ("data.strata=1000", "'in memory, 1,000 tokens and more' has a share of 0.45"),
    ],
)
def test_mixtures_that_do_not_fit_the_sources(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixed(override)


def test_a_source_of_weight_zero_is_left_out() -> None:
    zero = "data.mixture=((0.0, 1, 0, 1),)"
    stores = [SOURCES[0], random_store([3, 3]), SOURCES[2]]
    data = mixed(zero, stores=stores)  # source 1 has no document of stratum 1
    assert [cell.share > 0 for cell in data.statistics] == [True] * 2 + [False] * 2 + [
        True
    ] * 2


def test_natural_shares_read_all_text_once_an_epoch() -> None:
    data = mixed("data.mixture=()", "data.strata_mixture=()", "train.batch_size=1")
    source = data.train
    assert len(source.parts) == 1 and len(source.parts[0].packed) == 6
    batches = [source[step] for step in range(source.windows)]
    learned = sum(int(batch["weights"].sum()) for batch in batches)
    documents = sum(cell.documents for cell in data.statistics)
    assert learned == data.summary["train_tokens"] - documents


def entropy_of(texts: list[bytes]) -> float:
    tokenizer = ByteTokenizer()
    store = memory_store(texts)
    documents = DOCUMENTS._replace(
        tokens_N=store.tokens_N,
        start_D=store.offsets_M[:-1],
        end_D=store.offsets_M[1:],
    )
    source = EvalBatches((documents,), 4, LENGTH, 1, PAD)
    return unigram_entropy(source, tokenizer.bytes_per_token)


def test_unigram_entropy_counts_bytes_only() -> None:
    assert entropy_of([b"aaaa", b"a"]) == 0
    assert entropy_of([bytes(range(256))] * 3) == pytest.approx(8, abs=1e-12)
    # p = (3/4, 1/4): 0.811278...
    assert entropy_of([b"aaab"]) == pytest.approx(2 - 0.75 * np.log2(3), abs=1e-12)
    with pytest.raises(ValueError, match="held out for validation are empty"):
        entropy_of([b"", b""])


def test_unigram_entropy_is_a_byte_not_a_token() -> None:
    source = EvalBatches((ALL,), 4, LENGTH, 1, PAD)
    bytes_W = ByteTokenizer().bytes_per_token
    doubled = unigram_entropy(source, 2 * bytes_W)
    assert doubled == pytest.approx(unigram_entropy(source, bytes_W) / 2)


def test_load_data_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"To be, or not to be. " * 100)
    data = load_data(
        tiny.make(
            f"data.sources={tmp_path}/text.txt",
            "data.validation_fraction=0.1",
            f"train.seq_len={LENGTH}",
            "train.steps=60",
            "train.eval_batches=2",
        ),
        tmp_path,
    )
    # 2102 tokens, of which 210 are held out.
    assert data.summary == {
        "source": f"{tmp_path}/text.txt",
        "documents": 1,
        "train_tokens": 1892,
        "validation_tokens": 210,
        "windows": 119,
        "epochs": pytest.approx(60 * 4 / 119),
        "unigram_bits_per_byte": pytest.approx(3.0, abs=0.5),
    }
    chex.assert_shape(data.train[0]["tokens"], (4, LENGTH))
    assert len(data.validation) == 2
    text = data.tokenizer.decode(data.validation[0]["tokens"][0])
    assert text in "To be, or not to be. " * 2


def test_default_corpus_has_the_expected_entropy(tmp_path: Path) -> None:
    data = load_data(tiny.make("train.seq_len=256"), tmp_path)
    assert data.summary["unigram_bits_per_byte"] == pytest.approx(4.87, abs=0.05)
    assert data.summary["train_tokens"] == 4_884_727


def test_the_worked_example_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/mixtures.md").read_text()
    flags = re.findall(r"--config\.(\S+?)=('.*?'|\S+)", text.split("## A worked")[1])
    data = load_data(
        tiny.make(*(f"{name}={value.strip("'")}" for name, value in flags)), tmp_path
    )
    for row in statistics.summary_rows(data.statistics)[1:]:
        cells = [f"{c:,}" if isinstance(c, int) else c for c in row[1:]]
        assert " ".join(cells) in re.sub(" +", " ", text)
    (line,) = statistics.warnings(data.statistics, 4096)
    assert f"{statistics.total_padding(data.statistics):.1%} of the positions" in line
    assert f"{statistics.total_padding(data.statistics):.1%} of the positions" in text
    assert len(flags) == 6


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_input_is_fast(tmp_path: Path, packing: str) -> None:
    """At least a million tokens a second and core, from 50M on disk."""
    sizes = np.random.default_rng(0).lognormal(6, 1, 200_000).astype(int) + 2
    sizes = sizes[np.cumsum(sizes) < 50_000_000]
    made = random_store(sizes)
    made.tokens_N.tofile(tmp_path / "tokens")
    on_disk = np.memmap(tmp_path / "tokens", np.uint16, "r")
    store = made._replace(tokens_N=on_disk)
    data = mixed(
        f"data.packing={packing}",
        "data.strata=1024",
        "data.mixture=()",
        "train.seq_len=256",
        stores=[store],
    )
    started, steps = time.process_time(), 500
    for batch in iterate(data.train, 10**6, 10**6 + steps):
        chex.assert_shape(batch["tokens"], (16, 256))
    rate = steps * 16 * 256 / (time.process_time() - started)
    print(f"{packing}: {rate / 1e6:.1f} M tokens a second and core")
    assert rate > 1e6
