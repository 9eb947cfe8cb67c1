"""The step of reinforcement learning as a compiled program, for devices here or not."""

from __future__ import annotations

import jax

from kimi_jax import sharding
from kimi_jax.config import RL, Config, Model
from kimi_jax.infer.program import routes_shape
from kimi_jax.rl.experience import Experience, experience_shape
from kimi_jax.rl.step import objective
from kimi_jax.train.program import Program


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


def _experience(cfg: Config, mesh: jax.sharding.Mesh) -> Experience:
    assert cfg.rl is not None
    return experience_shape(
        cfg.train.seq_len,
        cfg.train.batch_size,
        sharding.batch_sharding(mesh),
        replay=recorded_routes(cfg.model) if cfg.rl.replay_routes else None,
        scored=scored_fields(cfg.rl),
    )


LEARNER = Program(objective, _experience)
