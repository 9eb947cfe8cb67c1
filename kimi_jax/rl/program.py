"""The step of reinforcement learning as a compiled program, for devices here or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from kimi_jax import sharding
from kimi_jax.config import RL, Config, Model
from kimi_jax.infer.program import routes_shape
from kimi_jax.rl.experience import experience_shape
from kimi_jax.rl.step import make_rl_step
from kimi_jax.train.step import State


def lower_rl_step(
    cfg: Config,
    mesh: jax.sharding.Mesh,
    transform: optax.GradientTransformation,
    state: State,
) -> Any:
    """The step on `mesh`, lowered: (state, experience, go) -> (state, metrics), in
    place.

    `state` tells shapes and places: the state itself, or its `state_shape`.
    """
    assert cfg.rl is not None
    where = jax.tree.map(lambda x: x.sharding, state)
    everywhere = sharding.replicated(mesh)
    step = jax.jit(
        make_rl_step(cfg, transform),
        donate_argnums=0,
        out_shardings=(where, everywhere),
    )
    experience = experience_shape(
        cfg.train.seq_len,
        cfg.train.batch_size,
        sharding.batch_sharding(mesh),
        replay=recorded_routes(cfg.model) if cfg.rl.replay_routes else None,
        scored=scored_fields(cfg.rl),
    )
    go = jax.ShapeDtypeStruct((), jnp.bool_, sharding=everywhere)
    with jax.set_mesh(mesh):
        return step.lower(state, experience, go)


def recorded_routes(model: Model) -> tuple[int, int, int] | None:
    """(L, A, experts) of what the sampler records; None: the model has no experts."""
    layers, active = routes_shape(model)
    return (layers, active, model.moe.num_experts) if layers else None


def scored_fields(rl: RL) -> list[str]:
    """Fields of an experience that hold log-probabilities of the learner's kind."""
    names = ["old_BT"]
    names += ["reference_BT"] * bool(rl.kl_weight)
    names += ["teacher_BT"] * bool(rl.distill_weight)
    return names
