"""The step does not depend on how a batch is split, and balances once a step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import canonical, sharding
from kimi_jax.train.batch import Batch
from kimi_jax.train.step import (
    init_state,
    make_eval_step,
    make_train_step,
    make_transform,
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
    transform = make_transform(cfg)
    state = jax.jit(lambda: init_state(cfg, transform))()
    step = jax.jit(make_train_step(cfg, transform))
    for i in range(steps):
        data = batch(i)
        if mesh is not None:
            data = jax.device_put(data, sharding.by_rows(mesh))
            state = jax.device_put(state, sharding.replicated(mesh))
        state, metrics = step(state, data)
    return state, metrics


METHODS = [
    "quantile",
    "quantile_exact",
    "quantile_threshold",
    "load_quantile",
    "sign",
    "aux_loss",
    "none",
]


# Balancing does not depend on the attention, so the cheapest serves.
SMALL = ("model.num_layers=2", "model.attention=gqa", "model.residual.block_size=1")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_balancing_method_steps(method):
    cfg = tiny.make(*SMALL, f"model.moe.balancing.method={method}")
    state, metrics = run(cfg)
    assert bool(metrics["finite"])
    (bias,) = canonical.flatten(cfg.model, state.balance).values()
    assert (float(jnp.ptp(bias)) > 0) == (method not in ("aux_loss", "none"))
    loads = canonical.flatten(cfg.model, metrics["stats"])
    tokens = int((batch().segment_ids_BT > 0).sum())
    slots = int(loads["layer_001/ffn/moe/load_E"].sum())
    if method == "quantile_threshold":
        assert 0 < slots <= tokens * cfg.model.moe.balancing.threshold_cap
    else:
        assert slots == tokens * cfg.model.moe.num_active


@pytest.mark.slow
@pytest.mark.parametrize("method", ["quantile", "quantile_exact"])
def test_neither_micro_batches_nor_devices_change_a_step(method):
    """The loss and gradient to rounding, and biases by what rounding moves them."""
    common = (*SMALL, f"model.moe.balancing.method={method}", "optimizer.kind=adamw")
    one, metrics = run(tiny.make(*common))
    split = tiny.make(*common, "train.micro_batches=2")
    meshed = tiny.make(*common, "mesh.data=4")
    for cfg, mesh in ((split, None), (meshed, sharding.make_mesh(meshed))):
        state, other = run(cfg, mesh=mesh)
        for name in ("loss", "gradient_norm"):
            np.testing.assert_allclose(metrics[name], other[name], rtol=2e-5)
        chex.assert_trees_all_close(one.balance, state.balance, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_evaluation_leaves_the_state_alone_and_agrees_with_training():
    cfg = tiny.make(*SMALL)
    state = init_state(cfg, make_transform(cfg))
    sums = jax.jit(make_eval_step(cfg))(state, batch())
    _, metrics = jax.jit(make_train_step(cfg, make_transform(cfg)))(state, batch())
    loss = float(sums["nats"] / sums["tokens"])
    np.testing.assert_allclose(loss, float(metrics["loss"]), rtol=1e-6)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing():
    cfg = tiny.make(*SMALL)
    state = init_state(cfg, transform := make_transform(cfg))
    params = dict(state.params)
    params["embedding"] = jax.tree.map(lambda x: x * jnp.nan, params["embedding"])
    state = state._replace(params=params)
    after, metrics = jax.jit(make_train_step(cfg, transform))(state, batch())
    assert not bool(metrics["finite"])
    chex.assert_trees_all_equal(after, state)
