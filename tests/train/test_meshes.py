"""Any mesh takes the step that one device takes: three times, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax import canonical, sharding
from kimi_jax.train.batch import Batch
from kimi_jax.train.step import State, make_train_step
from tests import tiny

# Each axis alone, and mixtures that have every axis between them.
MESHES = [
    *({axis: 2} for axis in ("data", "fsdp", "expert", "tensor", "context")),
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"expert": 2, "context": 4},
    {"fsdp": 2, "expert": 2, "context": 2},
]
STEPS = 3

CONFIG = (
    "model.dtype=float64",
    "model.num_layers=2",
    "model.attention=kda,mla",
    "model.residual.block_size=1",
    "model.moe.num_experts=8",
    "model.moe.capacity_factor=8",  # drops would be another step
    "train.batch_size=8",
)


def draw_batch(seed: int) -> Batch:
    """Rows of several documents, some across device borders, with padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (8, 33)).astype(np.int32)
    segment_ids = np.sort(rng.integers(1, 4, (8, 32)), axis=1).astype(np.int32)
    segment_ids[0, 12:] = 0
    weights = (segment_ids > 0) * rng.integers(0, 2, (8, 32)).astype(np.float64)
    return Batch(
        *map(jnp.asarray, (tokens[:, :-1], tokens[:, 1:], segment_ids, weights))
    )


def steps(mesh_sizes: dict[str, int]):
    """(state, losses and loads) after a few steps on a mesh of these sizes."""
    cfg = tiny.make(*CONFIG, *(f"mesh.{k}={v}" for k, v in mesh_sizes.items()))
    mesh = sharding.make_mesh(cfg)
    # Its trace is the gradient, and it is quick to compile.
    transform = optax.sgd(0.1, momentum=0.9)
    variables = tiny.variables(cfg.model)
    state = State(
        jnp.int32(0),
        variables["params"],
        variables["balance"],
        transform.init(variables["params"]),
    )
    placed = sharding.state_shardings(mesh, state)
    state = jax.device_put(state, placed)
    step = jax.jit(make_train_step(cfg, transform), out_shardings=(placed, None))
    seen = []
    with jax.set_mesh(mesh):
        for seed in range(STEPS):
            batch = jax.device_put(draw_batch(seed), sharding.batch_sharding(mesh))
            state, metrics = step(state, batch)
            seen.append((metrics["loss"], metrics["stats"]))
    return cfg.model, state, jax.tree.map(np.asarray, seen)


@functools.cache
def on_one_device():
    return steps({})


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", MESHES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items())
)
def test_any_mesh_takes_the_same_steps(sizes):
    with jax.enable_x64(True):
        model, one, seen_one = on_one_device()
        _, many, seen_many = steps(sizes)
        chex.assert_trees_all_close(seen_many, seen_one, rtol=1e-9, atol=1e-12)
        want, got = (canonical.flatten(model, s._asdict()) for s in (one, many))
        for name in want:
            np.testing.assert_allclose(
                got[name], want[name], rtol=1e-9, atol=1e-11, err_msg=name
            )
