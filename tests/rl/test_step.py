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
from kimi_jax.errors import UserError
from kimi_jax.rl.experience import make_experience, on_mesh
from kimi_jax.rl.step import make_score, objective
from kimi_jax.train.step import State, make_train_step
from tests import tiny
from tests.rl import trajectories
from tests.rl.test_losses import CASES

# Each as small as what is tested allows: compiling it is all that takes time.
COMMON = (
    "model.dtype=float64",
    "model.residual.kind=none",
    "model.residual.block_size=1",
    "model.moe.num_experts=8",
    "model.moe.num_shared=0",
    "model.moe.capacity_factor=8",  # drops would be another step
    "train.batch_size=8",
    "train.loss_chunk=512",
)
SHALLOW = (
    *COMMON,
    "model.num_layers=1",
    "model.ffn.num_dense_layers=0",
    "model.attention=gqa",
    "model.gqa.block_size=64",
)
HYBRID = (
    *COMMON,
    "model.num_layers=2",
    "model.attention=kda,mla",
    "model.mla.q_rank=None",
    "model.mla.positions=rope",
    "model.mla.block_size=64",
)
ROUTES = (1, 2, 8)  # of two layers the first has no experts
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


def step(overrides, sizes, settings=SETTINGS, **changes):
    """(model, state, metrics) after one step on a mesh of these sizes."""
    cfg = tiny.make(*overrides, *(f"mesh.{k}={v}" for k, v in sizes.items()))
    train = dataclasses.replace(cfg.train, **changes)
    cfg = dataclasses.replace(cfg, train=train, rl=settings)
    mesh = sharding.make_mesh(cfg)
    variables = tiny.variables(cfg.model)
    params, balance = variables["params"], variables["balance"]
    state = State(jnp.int32(0), params, balance, TRANSFORM.init(params))
    placed = sharding.state_shardings(mesh, state)
    state = jax.device_put(state, placed)
    taken = make_train_step(cfg, TRANSFORM, objective(cfg))
    run = jax.jit(taken, out_shardings=(placed, None))
    with jax.set_mesh(mesh):
        batch = on_mesh(experience(), sharding.batch_sharding(mesh))
        state, metrics = run(state, batch)
    return cfg.model, *jax.tree.map(np.asarray, (state, metrics))


def assert_same(model, one, many, rtol):
    """Parts of the state, by canonical names."""
    want, got = (canonical.flatten(model, tree) for tree in (one, many))
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=rtol, atol=rtol / 100, err_msg=name
        )


@pytest.mark.slow
def test_meshes_and_micro_batches_change_nothing():
    """Loss, gradients, metrics, biases and statistics, in float64."""
    with jax.enable_x64(True):
        model, one, metrics = step(SHALLOW, {})
        sizes = {"data": 2, "expert": 2, "context": 2}
        _, many, other = step(SHALLOW, sizes, micro_batches=2)
    assert bool(metrics["finite"]) and metrics["predicted"] > 30
    assert 0 < metrics["rl"]["routing_overlap"] < 1
    assert 0 < metrics["rl"]["clip_low"] < 1 and metrics["gradient_norm"] > 0.01
    for name in ("loss", "predicted", "rl", "stats"):
        chex.assert_trees_all_close(other[name], metrics[name], rtol=1e-9, atol=1e-12)
    assert_same(model, one._asdict(), many._asdict(), 1e-9)
    first, after = tiny.variables(model)["balance"], one.balance
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), first, after)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_rows_in_pieces_change_nothing():
    """Packed rows whose documents end in, at and across the borders of 4 pieces."""
    pieces = dataclasses.replace(SETTINGS, segment=8, update_balance=False)
    with jax.enable_x64(True):
        model, one, metrics = step(HYBRID, {})
        _, many, other = step(HYBRID, {}, pieces)
    for name in ("loss", "rl"):
        chex.assert_trees_all_close(other[name], metrics[name], rtol=1e-11, atol=1e-13)
    for name, x in metrics["stats"].items():
        if name.rsplit("/", 1)[-1] in ("load_E", "agreed_slots", "hidden_max"):
            np.testing.assert_allclose(other["stats"][name], x, rtol=1e-12)
    assert_same(model, one.params, many.params, 1e-10)
    assert_same(model, one.optimizer, many.optimizer, 1e-10)  # the gradients
    chex.assert_trees_all_equal(many.balance, tiny.variables(model)["balance"])


def scored(cfg):
    """What `make_score` takes."""
    variables = tiny.variables(cfg.model)
    return variables["params"], variables["balance"], experience()


def test_every_kind_of_layer_carries_its_past():
    cfg = tiny.make(*SHALLOW, "model.gqa.positions=rope", "model.dtype=bfloat16")
    shapes = jax.eval_shape(make_score(cfg, segment=8), *scored(cfg))
    assert [x.shape for x in shapes] == [(8, 32), (8, 32), (8, 32, 1, 2)]


@pytest.mark.parametrize(
    ("overrides", "segment", "message"),
    [
        ((), 12, r"config.rl.segment=12.*seq_len=32; use 8"),
        ((), 1, "at least 2 tokens.*use 2"),
        (("mesh.context=2",), 8, r"config.rl.segment=8 and config.mesh.context=2"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(overrides, segment, message):
    cfg = tiny.make(*SHALLOW, "model.dtype=float32", *overrides)
    score, given = make_score(cfg, segment=segment), scored(cfg)
    with (
        jax.set_mesh(sharding.make_mesh(cfg)),
        pytest.raises(UserError, match=message),
    ):
        jax.eval_shape(score, *given)
