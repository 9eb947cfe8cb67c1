"""The acting half of an iteration: environments, a generator, and where they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax import config, sharding
from kimi_jax.config import RL, Config
from kimi_jax.data.store import check_vocabulary
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.environments import specs
from kimi_jax.environments.environment import Environment, Task
from kimi_jax.environments.format import Format, make_format
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.sampling import Sampling
from kimi_jax.rl.rollout import Limits, Rollouts
from kimi_jax.rl.task_sampler import Cell
from kimi_jax.rl.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class World:
    """The environments of a run and their language."""

    form: Format
    cells: tuple[Cell, ...]  # a difficulty and a length each

    def environment(self, task: Task) -> Environment:
        return specs.make_of(task, self.form)


def make_world(cfg: Config, environments: Sequence[str]) -> World:
    """The environments that specs name.

    Raises:
      UserError: all that cannot be made, with the fix.
    """
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    check_vocabulary(tokenizer, cfg.model.vocab_size)
    form = make_format(tokenizer)
    cells = specs.parse_list(environments)
    problems = []
    for cell in cells:
        try:
            specs.make(cell, form)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n  - ".join(["these tasks cannot be played:", *problems]))
    return World(form, tuple(Cell.of(specs.task_of(cell, 0)) for cell in cells))


def rollout_mesh(cfg: Config, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Where trajectories are written: on the devices after those of `mesh`, or on it.

    Raises:
      UserError: too few devices, or sizes that do not divide what they split.
    """
    rl = cfg.rl
    assert rl is not None
    sizes = cfg.mesh if rl.rollout_mesh is None else rl.rollout_mesh
    train = dataclasses.replace(
        cfg.train, batch_size=rl.slots, micro_batches=1, seq_len=rl.max_tokens
    )
    as_rows = dataclasses.replace(cfg, mesh=sizes, train=train)
    if rl.rollout_mesh is None:
        _check_slots(rl, sharding.row_shards(mesh))
        return mesh
    devices = jax.devices()
    learner = mesh.size
    needed = int(np.prod(dataclasses.astuple(rl.rollout_mesh)))
    if learner + needed > len(devices):
        raise UserError(
            f"config.rl.rollout_mesh: {needed} devices after the {learner} of "
            f"config.mesh, and there are {len(devices)}; use fewer for either, or "
            "--config.rl.rollout_mesh=none to share them"
        )
    made = sharding.make_mesh(as_rows, devices[learner:])
    _check_slots(rl, sharding.row_shards(made))
    return made


def on_mesh(variables: Any, mesh: jax.sharding.Mesh) -> Any:
    """{"params", "balance"} on `mesh`; copied only if they lie elsewhere."""
    return jax.device_put(variables, sharding.state_shardings(mesh, variables))


def sampling(rl: RL) -> Sampling:
    """How a policy in training draws."""
    return Sampling(rl.temperature, top_p=rl.top_p)


def make_rollouts(
    cfg: Config,
    world: World,
    variables: Any,
    mesh: jax.sharding.Mesh,
    how: Sampling | None = None,
    seed: int | None = None,
) -> Rollouts:
    """With a generator of its own, within the limits of the config.

    Args:
      how: None: as in training.
      seed: of the draws; None: that of training.
    """
    rl = cfg.rl
    assert rl is not None
    generator = Generator(
        cfg.model,
        variables,
        slots=rl.slots,
        length=rl.max_tokens,
        mesh=mesh,
        decode_steps=rl.decode_steps,
        routes="moe" in config.ffn_kinds(cfg.model),
    )
    return Rollouts(
        generator,
        world.environment,
        Limits(
            turn_tokens=rl.turn_tokens,
            max_turns=rl.max_turns,
            max_tokens=rl.max_tokens,
            max_calls=rl.max_calls,
            seconds=rl.max_seconds,
        ),
        sampling(rl) if how is None else how,
        ((world.form.end,),),
        cfg.train.seed if seed is None else seed,
    )


def play(
    cfg: Config,
    world: World,
    variables: Any,
    mesh: jax.sharding.Mesh,
    tasks: Sequence[Task],
    how: Sampling,
) -> list[Trajectory]:
    """Each task once, to its end, in the order of the tasks.

    In slots of its own: trajectories that live elsewhere go on undisturbed.
    """
    assert cfg.rl is not None
    whole = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, max_calls=None))
    seed = cfg.evaluation.seed
    rollouts = make_rollouts(whole, world, variables, mesh, how, seed)
    done = rollouts.run(tasks, group_size=1, version=0)
    return sorted(done, key=lambda trajectory: trajectory.group)


def _check_slots(rl: RL, rows: int) -> None:
    if rl.slots % rows:
        raise UserError(
            f"config.rl.slots={rl.slots}: the mesh splits them into {rows} parts; use "
            f"slots={-(-rl.slots // rows) * rows}"
        )
    if rl.slots == rows and rl.group_size > 1:
        raise UserError(
            f"config.rl.slots={rl.slots}: one in each of {rows} parts of the mesh, and "
            "a prompt and a member of its group lie side by side; use slots="
            f"{2 * rows} or more"
        )
