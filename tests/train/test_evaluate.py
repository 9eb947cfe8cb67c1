"""Evaluation by position against a sum in numpy over the losses of single tokens."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import sharding
from kimi_jax.data.loader import make_data
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.errors import UserError
from kimi_jax.modules import transformer
from kimi_jax.train import evaluate
from kimi_jax.train.batch import on_mesh
from kimi_jax.train.evaluate import Evaluator, position_bins, rows_at
from kimi_jax.train.step import State, token_losses
from tests import tiny
from tests.data.stores import memory_store

OVERRIDES = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.ffn.num_dense_layers=0",
    "model.residual.block_size=1",
    "train.eval_length_multiples=1,4",
    "train.eval_batches=2",
    "train.seq_len=24",
    "data.validation_fraction=0.5",
)


@pytest.fixture(scope="module")
def case():
    """(cfg, data, mesh, state): documents of up to 90 tokens."""
    cfg = tiny.make(*OVERRIDES)
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, size)) for size in rng.integers(5, 90, 40)]
    data = make_data([memory_store(texts)], ByteTokenizer(), cfg)
    variables = tiny.variables(cfg.model)
    step = jnp.zeros((), jnp.int32)
    state = State(step, variables["params"], variables["balance"], ())
    return cfg, data, sharding.make_mesh(cfg), state


def reference(case, length: int, batch_size: int, edges: tuple[int, ...]):
    """{bin edge: (nats, tokens)} and bytes of text, token by token."""
    cfg, data, mesh, state = case
    variables = {"params": state.params, "balance": state.balance}
    batches = data.validation.at(length, batch_size)

    @jax.jit
    def losses(batch):
        tokens = batch.tokens_BT, batch.segment_ids_BT
        out = transformer.apply(cfg.model, variables, *tokens)
        return token_losses(cfg, out, batch)[1].reshape(batch.tokens_BT.shape)

    nats, tokens, num_bytes = {}, {}, 0
    for i in range(len(batches)):
        host = batches[i]
        loss_BT = np.asarray(
            losses(on_mesh(host, sharding.batch_sharding(mesh))), np.float64
        )
        for row in range(batch_size):
            position, before = 0, 0
            for t in range(length):
                segment = host["segment_ids"][row, t]
                position = position + 1 if segment == before else 1
                before = segment
                if not host["weights"][row, t]:
                    continue
                edge = next(edge for edge in edges if position <= edge)
                nats[edge] = nats.get(edge, 0.0) + loss_BT[row, t]
                tokens[edge] = tokens.get(edge, 0) + 1
                num_bytes += host["targets"][row, t] < 256
    return nats, tokens, num_bytes


@pytest.mark.slow
def test_losses_by_position(case):
    cfg, data, mesh, state = case
    before = jax.tree.map(np.asarray, state)
    record = Evaluator(cfg, data, mesh, state)(state)
    jax.tree.map(np.testing.assert_array_equal, before, state)

    assert list(record["lengths"]) == ["24", "96"]
    shapes = {24: (4, (1, 2, 4, 8, 16, 24)), 96: (1, (1, 2, 4, 8, 16, 24, 48, 96))}
    for length, (batch_size, edges) in shapes.items():
        nats, tokens, num_bytes = reference(case, length, batch_size, edges)
        got = record["lengths"][str(length)]
        assert got["position_tokens"] == {str(e): tokens[e] for e in sorted(tokens)}
        want = {str(e): nats[e] / tokens[e] for e in sorted(tokens)}
        assert got["position_loss"] == pytest.approx(want, rel=1e-5)
        total = sum(nats.values())
        assert got["tokens"] == sum(tokens.values())
        assert got["loss"] == pytest.approx(total / got["tokens"], rel=1e-5)
        assert got["bits_per_byte"] == pytest.approx(
            total / np.log(2) / num_bytes, rel=1e-5
        )
    far = [e for e in tokens if e > 24]
    assert got["beyond_tokens"] == sum(tokens[e] for e in far) > 0
    beyond = sum(nats[e] for e in far) / got["beyond_tokens"]
    assert got["beyond_loss"] == pytest.approx(beyond, rel=1e-5)
    assert "beyond_loss" not in record["lengths"]["24"]
    for name in ("loss", "bits_per_byte", "tokens"):
        assert record[name] == record["lengths"]["24"][name]


def test_bins_double_and_end_at_the_training_length():
    assert position_bins(256, 256) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert position_bins(24, 24) == (1, 2, 4, 8, 16, 24)
    assert position_bins(24, 72) == (1, 2, 4, 8, 16, 24, 48, 72)
    assert position_bins(1, 4) == (1, 2, 4)


def test_evaluation_batches_hold_as_many_tokens_as_training_batches():
    train = tiny.make("train.batch_size=16").train
    assert [rows_at(train, n, 1) for n in (1, 2, 4, 32)] == [16, 8, 4, 1]
    assert [rows_at(train, n, 8) for n in (1, 2, 4)] == [16, 8, 8]
    assert rows_at(train, 3, 2) == 4


def test_bins_without_a_token_are_left_out():
    sums = {
        "nats": np.array([2.0, 0.0, 6.0]),
        "tokens": np.array([1.0, 0.0, 2.0]),
        "bytes": np.array([1.0, 0.0, 0.0]),
    }
    record = evaluate.summarise(sums, (1, 2, 4), 2)
    assert record["position_loss"] == {"1": 2.0, "4": 3.0}
    assert record["loss"] == pytest.approx(8 / 3) and record["beyond_loss"] == 3.0
    assert np.isnan(record["beyond_bits_per_byte"])


def test_answers_that_are_right_are_counted_by_bin():
    sums = {
        "nats": np.array([2.0, 0.0, 6.0]),
        "tokens": np.array([1.0, 0.0, 3.0]),
        "bytes": np.array([1.0, 0.0, 3.0]),
        "correct": np.array([1.0, 0.0, 1.0]),
    }
    record = evaluate.summarise(sums, (1, 2, 4), 4)
    assert record["accuracy"] == 0.5
    assert record["position_accuracy"] == {"1": 1.0, "4": pytest.approx(1 / 3)}


def test_windows_longer_than_the_held_out_text_are_named():
    cfg = tiny.make(*OVERRIDES, "train.eval_length_multiples=1,4,5")
    data = types.SimpleNamespace(summary={"validation_tokens": 96})
    with pytest.raises(UserError, match=r"5 asks for windows of 120 tokens.* has 96"):
        evaluate.check_lengths(cfg, data)
    evaluate.check_lengths(tiny.make(*OVERRIDES), data)
    generated = types.SimpleNamespace(summary={})
    evaluate.check_lengths(cfg, generated)
