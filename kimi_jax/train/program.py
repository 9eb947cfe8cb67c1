"""The train step as a compiled program, for devices that are here or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from kimi_jax import sharding
from kimi_jax.config import Config
from kimi_jax.train.batch import batch_shape
from kimi_jax.train.step import (
    Objective,
    State,
    cross_entropy,
    init_state,
    make_train_step,
)


class Program(NamedTuple):
    """A kind of optimizer step.

    Attributes:
      objective: what the steps of a config minimise.
      batch: the shapes of what one step takes, on a mesh.
    """

    objective: Callable[[Config], Objective]
    batch: Callable[[Config, Mesh], Any]


def _rows(cfg: Config, mesh: Mesh) -> Any:
    return batch_shape(cfg.train, sharding.batch_sharding(mesh), cfg.model.vision)


PRE_TRAINING = Program(cross_entropy, _rows)


def state_shape(
    cfg: Config, mesh: Mesh, transform: optax.GradientTransformation
) -> State:
    """Shapes, dtypes and shardings of the training state."""
    shapes = jax.eval_shape(lambda: init_state(cfg, transform))
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        sharding.state_shardings(mesh, shapes),
    )


def lower_step(
    program: Program,
    cfg: Config,
    mesh: Mesh,
    transform: optax.GradientTransformation,
    state: State,
) -> Any:
    """The step on `mesh`, lowered: (state, batch, go) -> (state, metrics), in place.

    Args:
      state: tells shapes and places: the state itself, or its `state_shape`.
    """
    step = make_train_step(cfg, transform, program.objective(cfg))
    where = jax.tree.map(lambda x: x.sharding, state)
    everywhere = sharding.replicated(mesh)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, everywhere))
    go = jax.ShapeDtypeStruct((), jnp.bool_, sharding=everywhere)
    with jax.set_mesh(mesh):
        return jitted.lower(state, program.batch(cfg, mesh), go)


def compile_fast(mesh: Mesh) -> dict[str, int] | None:
    """Compiler options for a program that runs once.

    On a CPU, LLVM takes a minute to optimise the random draws of a small model.
    """
    platform = mesh.devices.flat[0].platform
    return {"xla_backend_optimization_level": 0} if platform == "cpu" else None
