"""Generated tasks as training data: seeks, shares of rows, grades, bad input."""

from pathlib import Path

import chex
import numpy as np
import pytest

from kimi_jax import config_io
from kimi_jax.data.loader import Reader, load_data
from kimi_jax.data.tokenizer import SymbolTokenizer
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.errors import UserError
from tests import tiny
from tests.tasks import oracles

TASKS = "task:mqar:pairs=2:symbols=16,task:stack:length=20"


def make(*overrides: str, sources: str = TASKS):
    cfg = tiny.make(
        f"data.sources={sources}",
        "data.tokenizer=symbols:64",
        "train.batch_size=8",
        *overrides,
    )
    return load_data(cfg, Path("unused"))


def test_batches_are_a_pure_function_of_seed_and_step() -> None:
    train, again, other = (make(f"data.seed={seed}").train for seed in (0, 0, 1))
    for step in (0, 7, 10**9):
        chex.assert_trees_all_equal(train[step], again[step])
    assert (train[0]["tokens"] != train[1]["tokens"]).any()
    assert (train[0]["tokens"] != other[0]["tokens"]).any()


def test_readers_share_the_rows() -> None:
    data = make()
    for source, step in ((data.train, 3), (data.validation, 0)):
        whole = source.rows(step, 0, 1)
        parts = [Reader(source, i, 4)[step] for i in range(4)]
        joined = {name: np.concatenate([p[name] for p in parts]) for name in whole}
        chex.assert_trees_all_equal(joined, whole)


def test_answers_alone_have_weight() -> None:
    batch = make(sources="task:mqar:pairs=3:symbols=16").train[0]
    assert batch["weights"].sum(axis=1).tolist() == [3.0] * 8
    for row in range(8):
        where = np.flatnonzero(batch["weights"][row]).tolist()
        tokens = batch["tokens"][row].tolist()
        assert oracles.mqar(tokens, where) == batch["targets"][row][where].tolist()
    assert (batch["segment_ids"] == 1).all()


def test_what_is_shorter_than_a_row_is_padded() -> None:
    data = make(sources="task:stack:length=20")
    batch = data.train[0]
    assert (batch["segment_ids"][:, 20:] == 0).all()
    assert (batch["tokens"][:, 20:] == data.tokenizer.pad).all()
    assert not batch["weights"][:, 20:].any()


def test_the_mixture_says_how_often_each_task_comes() -> None:
    def stacks(*overrides: str) -> float:
        train = make(*overrides).train
        padded = [(train[i]["segment_ids"][:, -1] == 0).sum() for i in range(40)]
        return sum(padded) / 320

    assert stacks() == pytest.approx(0.5, abs=0.02)
    assert stacks("data.mixture=((0.0, 3.0, 1.0),)") == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="1 weights in a row for 2 sources"):
        make("data.mixture=((0.0, 3.0),)")


def test_validation_has_instances_of_its_own_and_other_lengths() -> None:
    data = make("train.eval_batches=2", sources="task:mqar:pairs=2:symbols=16")
    held_out = data.validation
    assert len(held_out) == 2 and held_out.graded
    chex.assert_trees_all_equal(held_out[1], held_out[1])
    assert (held_out[0]["tokens"] != data.train[0]["tokens"]).any()
    longer = held_out.at(64, 3)
    assert len(longer) == 6  # 16 rows in batches of 3
    assert longer[0]["tokens"].shape == (3, 64)
    assert longer[0]["weights"].sum() == 6  # as many pairs, with more between them
    with pytest.raises(IndexError, match="batch 2 of 2"):
        held_out[2]


def test_the_figures_of_a_run_on_tasks() -> None:
    data = make()
    assert data.summary["source"] == "mqar:pairs=2:symbols=16, stack:length=20"
    # The values of MQAR are 8 symbols, the elements of the stacks 16 others.
    assert 3.0 < data.summary["unigram_bits_per_byte"] <= np.log2(24)
    assert data.identity["source 0"] == "mqar:pairs=2:symbols=16"
    assert make("data.haystack=generated").identity == data.identity


@pytest.mark.parametrize(
    ("sources", "match"),
    [
        ("task:mqar,corpus.txt", "'task:mqar' is a generated task and 'corpus.txt'"),
        (
            "task:stack:length=64",
            "length=64, more than a row of config.train.seq_len=32",
        ),
        ("task:mqar:pairs=2/4", "is 2 tasks; name each: 'task:mqar:pairs=2'"),
        ("task:mqr", "did you mean 'mqar'"),
        ("task:mqar:pairs=2:symbols=80", "room for 64; .*symbols:81"),
        ("task:needle", "cannot spell"),
    ],
)
def test_sources_that_cannot_be_are_named(sources: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        make(sources=sources)


def test_tasks_have_no_strata() -> None:
    with pytest.raises(
        config_io.ConfigError, match="generated tasks and episodes have no strata"
    ):
        make("data.strata=16")


def test_a_haystack_of_real_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It rains. It pours. The old man snores. " * 3)
    overrides = (
        f"data.haystack={tmp_path}",
        "data.tokenizer=bytes",
        "train.seq_len=256",
    )
    batch = make(*overrides, sources="task:needle:digits=2").train[0]
    assert "It pours. The old man snores." in oracles.TOKENIZER.decode(
        batch["tokens"][0]
    )
    with pytest.raises(UserError, match=r"config.data.haystack='none.such': source"):
        make("data.haystack=none.such", *overrides[1:], sources="task:needle")


def test_symbol_tokenizer() -> None:
    tokenizer = load_tokenizer("symbols:20")
    assert isinstance(tokenizer, SymbolTokenizer) and tokenizer.vocab_size == 23
    assert tokenizer.encode(b" 3 17\n").tolist() == [3, 17]
    assert tokenizer.decode([tokenizer.bos, 3, 17, tokenizer.pad]) == "3 17"
    assert tokenizer.bytes_per_token.sum() == 20
    with pytest.raises(UserError, match="has the numbers 0 to 19; write them"):
        tokenizer.encode(b"KING")
    with pytest.raises(UserError, match="'symbols:N' with N of 1 or more"):
        load_tokenizer("symbols:0")
