"""Meshes and micro-batches change no number of a step, with experts replayed."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax import canonical, sharding
from kimi_jax.rl.experience import make_experience, on_mesh
from kimi_jax.rl.step import make_rl_step
from kimi_jax.train.step import State
from tests import tiny
from tests.rl import trajectories
from tests.rl.test_losses import CASES

CONFIG = (
    "model.dtype=float64",
    "model.num_layers=2",
    "model.attention=kda,mla",
    "model.residual.block_size=1",
    "model.moe.num_experts=8",
    "model.moe.capacity_factor=8",  # drops would be another step
    "train.batch_size=8",
)
ROUTES = (1, 2, 8)  # of the two layers the first has no experts
SETTINGS = dataclasses.replace(CASES["all"], ratio="sequence")
TRANSFORM = optax.sgd(0.1, momentum=0.9)  # its trace is the gradient


@functools.cache
def experience():
    rng = np.random.default_rng(5)
    made = [
        trajectories.draw(rng, rng.integers(1, 5, size=1 + i % 3), i, ROUTES)
        for i in range(16)
    ]
    credit = [rng.normal(size=len(one.turns)) for one in made]
    (batch,) = make_experience(made, credit, 32, 8, batches=1, replay=ROUTES).batches
    assert batch.segment_ids_BT.max() > 1 and batch.weights_BT.sum() > 30
    batch.routes_BTLA[:, ::5] = ROUTES[2]  # some choose freely
    near = [batch.behaviour_BT + rng.normal(0, 0.1, (8, 32)) for _ in range(3)]
    batch = batch._replace(reference_BT=near[0], old_BT=near[1], teacher_BT=near[2])
    return jax.tree.map(lambda x: x if x.dtype == np.int32 else x.astype(float), batch)


@functools.cache
def whole():
    """On one device, in whole rows."""
    return step({})


def step(sizes, settings=SETTINGS, **changes):
    """(state, metrics) after one step on a mesh of these sizes."""
    cfg = tiny.make(*CONFIG, *(f"mesh.{k}={v}" for k, v in sizes.items()))
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))
    mesh = sharding.make_mesh(cfg)
    variables = tiny.variables(cfg.model)
    params, balance = variables["params"], variables["balance"]
    state = State(jnp.int32(0), params, balance, TRANSFORM.init(params))
    placed = sharding.state_shardings(mesh, state)
    state = jax.device_put(state, placed)
    run = jax.jit(make_rl_step(cfg, TRANSFORM, settings), out_shardings=(placed, None))
    with jax.set_mesh(mesh):
        batch = on_mesh(experience(), sharding.batch_sharding(mesh))
        state, metrics = run(state, batch)
    return cfg.model, *jax.tree.map(np.asarray, (state, metrics))


@pytest.mark.slow
def test_meshes_and_micro_batches_change_nothing():
    """Loss, gradients, metrics, biases and statistics, in float64."""
    with jax.enable_x64(True):
        model, one, metrics = whole()
        sizes = {"data": 2, "expert": 2, "context": 2}
        _, many, other = step(sizes, micro_batches=2)
    assert bool(metrics["finite"]) and metrics["predicted"] > 30
    assert 0 < metrics["rl"]["routing_overlap"] < 1
    assert 0 < metrics["rl"]["clip_low"] < 1 and metrics["gradient_norm"] > 0.01
    for name in ("loss", "predicted", "rl", "stats"):
        chex.assert_trees_all_close(other[name], metrics[name], rtol=1e-9, atol=1e-12)
    want, got = (canonical.flatten(model, s._asdict()) for s in (one, many))
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=1e-9, atol=1e-11, err_msg=name
        )
    first = canonical.flatten(model, tiny.variables(model)["balance"])
    after = canonical.flatten(model, one.balance)
    assert all(np.abs(after[k] - first[k]).max() > 1e-3 for k in first)


@pytest.mark.slow
def test_rows_in_pieces_change_nothing():
    """Packed rows whose documents end in, at and across the borders of 4 pieces."""
    with jax.enable_x64(True):
        model, one, metrics = whole()
        settings = dataclasses.replace(SETTINGS, segment=8)
        _, many, other = step({}, settings)
    for name in ("loss", "rl"):
        chex.assert_trees_all_close(other[name], metrics[name], rtol=1e-11, atol=1e-13)
    for name, x in metrics["stats"].items():
        if name.rsplit("/", 1)[-1] in ("load_E", "agreed_slots", "depth_weights"):
            np.testing.assert_allclose(other["stats"][name], x, rtol=1e-12)
    want, got = (canonical.flatten(model, s._asdict()) for s in (one, many))
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=1e-10, atol=1e-12, err_msg=name
        )
