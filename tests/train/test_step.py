"""The step does not depend on how a batch is split, and balances once a step."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax import canonical, sharding
from kimi_jax.train import health, qk_clip
from kimi_jax.train.batch import Batch
from kimi_jax.train.step import (
    State,
    make_train_step,
    restart_clock,
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


# Its trace is the gradient, and it is quick to compile; optimizers are functions of the
# gradient and have tests of their own.
TRANSFORM = optax.sgd(0.1, momentum=0.9)


def start(model):
    """A state that no program had to be compiled for."""
    variables = tiny.variables(model)
    params, balance = variables["params"], variables["balance"]
    return State(jnp.int32(0), params, balance, TRANSFORM.init(params))


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
SMALL = (
    "model.num_layers=1",
    "model.ffn.num_dense_layers=0",
    "model.attention=gqa",
    "model.residual.block_size=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_balancing_method_steps(method):
    cfg = tiny.make(*SMALL, f"model.moe.balancing.method={method}")
    first = start(cfg.model)
    zero = jax.tree.map(jnp.zeros_like, first.balance)
    first = first._replace(balance=zero)

    @jax.jit
    def step(state, batch):
        """No gradient leaves it, so that none has to be compiled."""
        state, metrics = make_train_step(cfg, TRANSFORM)(state, batch)
        return state.balance, metrics["stats"]

    balance, stats = step(first, batch())
    (bias,) = canonical.flatten(cfg.model, balance).values()
    assert (float(jnp.ptp(bias)) > 0) == (method not in ("aux_loss", "none"))
    loads = canonical.flatten(cfg.model, stats)
    tokens = int((batch().segment_ids_BT > 0).sum())
    slots = int(loads["layer_000/ffn/moe/load_E"].sum())
    layers = health.layer_metrics(cfg.model, stats, balance)
    (moved,) = layers["moe/bias_update"]
    np.testing.assert_allclose(moved, np.abs(bias).max(), rtol=1e-6)  # from zero
    if method == "quantile_threshold":
        assert 0 < slots <= tokens * cfg.model.moe.balancing.threshold_cap
    else:
        assert slots == tokens * cfg.model.moe.num_active


def documents(packed):
    """Eight documents, a row each, or packed into four rows; 16 rows in all."""
    rng = np.random.default_rng(0)
    lengths = [9, 6, 9, 14, 10, 3, 20, 4]
    rows = [(0, 1, 2), (3, 4), (6, 7), (5,)] if packed else [(i,) for i in range(8)]
    tokens, targets, segment_ids = np.zeros((3, 16, 24), np.int32)
    weights = np.zeros((16, 24))
    texts = [rng.integers(0, 256, n + 1) for n in lengths]
    for row, members in enumerate(rows):
        at = 0
        for number, i in enumerate(members, start=1):
            here = row, slice(at, at + lengths[i])
            tokens[here], targets[here] = texts[i][:-1], texts[i][1:]
            segment_ids[here], weights[here] = number, 1.0
            at += lengths[i]
    return Batch(*map(jnp.asarray, (tokens, targets, segment_ids, weights)))


TAU = 0.9  # between the largest logits of the two heads below


@pytest.fixture
def first_step():
    """A function: (batch, micro-batches, devices) -> the step from one state."""
    cfg = tiny.make(
        "model.dtype=float64",
        "model.num_layers=2",
        "model.attention=kda,mla",
        "model.residual.block_size=1",
        "model.moe.balancing.method=quantile_exact",
        "optimizer.kind=adamw",
        f"optimizer.qk_clip={TAU}",
        "train.batch_size=16",
    )

    @functools.cache
    def program(micro, devices):
        changes = {"train": {"micro_batches": micro}, "mesh": {"data": devices}}
        own = dataclasses.replace(
            cfg,
            **{
                k: dataclasses.replace(getattr(cfg, k), **v) for k, v in changes.items()
            },
        )
        return sharding.make_mesh(own), jax.jit(
            make_train_step(own, TRANSFORM),
            # It runs twice at most, and most of its time is LLVM's.
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def run(batch, micro=1, devices=1):
        mesh, step = program(micro, devices)
        first = jax.device_put(start(cfg.model), sharding.replicated(mesh))
        return first, *step(first, jax.device_put(batch, sharding.batch_sharding(mesh)))

    with jax.enable_x64(True):
        yield cfg.model, run


def of_tokens(metrics):
    """All metrics but KDA's of rows, however packed: last states, and first tiles."""
    stats = metrics["stats"]
    of_rows = ("/state_", "/tile_decay")
    stats = {k: x for k, x in stats.items() if not any(part in k for part in of_rows)}
    return metrics | {"stats": stats}


@pytest.mark.slow
def test_nothing_but_the_tokens_decides_a_step(first_step):
    """Neither micro-batches nor packing nor devices change a number, in float64.

    That is the loss, the gradients, the parameters, the router biases, every statistic
    of the layers, and the largest logits, by which QK-clip scales one head of two.
    """
    model, run = first_step
    separate = documents(packed=False)
    first, one, metrics = run(separate)
    for name, (_, state, other) in {
        "packed": run(documents(packed=True)),
        "4 micro-batches, 4 devices": run(separate, micro=4, devices=4),
    }.items():
        compared = of_tokens if name == "packed" else dict
        chex.assert_trees_all_close(
            (one, compared(metrics)),
            (state, compared(other)),
            rtol=1e-10,
            atol=1e-12,
            custom_message=name,
        )

    (name,) = logits = {
        k: x for k, x in metrics["stats"].items() if k.endswith(qk_clip.STATISTIC)
    }
    assert metrics["groups"]["qk_clip/heads"] == 1
    plain = jax.tree.map(lambda p, g: p - 0.1 * g, first.params, one.optimizer[0].trace)
    clipped = qk_clip.clip(model, plain, logits, TAU)
    chex.assert_trees_all_close(clipped, one.params, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing():
    cfg = tiny.make(*SMALL)
    state = start(cfg.model)
    params = dict(state.params)
    params["embedding"] = jax.tree.map(lambda x: x * jnp.nan, params["embedding"])
    state = state._replace(params=params)
    after, metrics = jax.jit(make_train_step(cfg, TRANSFORM))(state, batch())
    assert not bool(metrics["finite"])
    chex.assert_trees_all_equal(after, state)


def test_a_clock_that_starts_again_keeps_the_moments():
    """Two steps of a schedule that halves: the first rate comes back, Adam goes on."""
    transform = optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(lambda step: 0.5**step)
    )
    params = {"w": jnp.ones(3)}
    state = State(jnp.zeros((), jnp.int32), params, {}, transform.init(params))
    for _ in range(2):
        _, moments = transform.update(params, state.optimizer)
        state = state._replace(step=state.step + 1, optimizer=moments)
    again = restart_clock(state)
    adam, clock = again.optimizer
    assert int(again.step) == int(clock.count) == 0 and clock.count.dtype == jnp.int32
    chex.assert_trees_all_equal(adam, state.optimizer[0])
    assert int(adam.count) == 2 and again.params is state.params
