"""The train step as a compiled program, for devices that are here or not."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from kimi_jax import sharding
from kimi_jax.config import Config
from kimi_jax.train.batch import batch_shape
from kimi_jax.train.step import State, init_state, make_train_step, make_transform


def state_shape(cfg: Config, mesh: Mesh) -> State:
    """Shapes, dtypes and shardings of the training state."""
    shapes = jax.eval_shape(lambda: init_state(cfg, make_transform(cfg)))
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        sharding.state_shardings(mesh, shapes),
    )


def lower_train_step(cfg: Config, mesh: Mesh) -> Any:
    """The step on `mesh`, lowered: (state, batch) -> (state, metrics), in place."""
    state = state_shape(cfg, mesh)
    where = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(
        make_train_step(cfg, make_transform(cfg)),
        donate_argnums=0,
        out_shardings=(where, sharding.replicated(mesh)),
    )
    with jax.set_mesh(mesh):
        batch = batch_shape(cfg.train, sharding.batch_sharding(mesh))
        return step.lower(state, batch)
