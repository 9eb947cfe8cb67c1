"""What a run of reinforcement learning knows besides its parameters.

Which tasks succeed how often, groups whose members have not all finished, trajectories
that found no room in the rows of an iteration, and old groups that are learned again.
All of it is plain values, in every checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kimi_jax.config import RL
from kimi_jax.environments.environment import Task
from kimi_jax.rl import health
from kimi_jax.rl.advantages import assign
from kimi_jax.rl.archive import Entry
from kimi_jax.rl.buffer import Buffer, Gather
from kimi_jax.rl.task_sampler import Cell, TaskSampler
from kimi_jax.rl.trajectory import Trajectory, from_json


class Lesson(NamedTuple):
    """What an iteration learns.

    Attributes:
      entries: trajectories with their advantages.
      finished: all that finished, with their advantages if they are learned now.
      numbers: for the "rl" field of the record.
    """

    entries: list[Entry]
    finished: list[Entry]
    numbers: dict[str, Any]


class Memory:
    """See the module.

    Attributes:
      iteration: finished ones.
    """

    def __init__(self, rl: RL, cells: Sequence[Cell], seed: int):
        self._rl, self._seed = rl, seed
        self.iteration = 0
        self._sampler = TaskSampler(cells, seed, rl.sampler)
        self._gather = Gather(rl.group_size)
        # A group is younger than max_staleness iterations, each of which has so many.
        capacity = rl.groups * rl.max_staleness if rl.reuse else 0
        self._buffer = Buffer(capacity, rl.max_staleness, seed)
        self._waiting: list[Entry] = []

    @property
    def version(self) -> int:
        """Of the policy: it changes once an iteration."""
        return self.iteration

    def draw(self) -> list[Task]:
        """The tasks of the groups that are new in this iteration."""
        return self._sampler.draw(self._rl.groups)

    def lesson(self, finished: Sequence[Trajectory]) -> Lesson:
        """Whole groups with their advantages, and old ones beside them."""
        rl = self._rl
        groups = self._gather.add(finished)
        for group in groups:
            rate = sum(t.success for t in group) / len(group)
            self._sampler.update(group[0].task, rate)
        numbers: dict[str, Any] = health.group_health(groups)
        if rl.rewards == "shuffled":
            groups = shuffled(groups, (self._seed, self.iteration))
        elif rl.rewards == "none":
            groups = [[_paid(t, 0.0) for t in group] for group in groups]
        fresh, flat = self._credit(groups)
        old: list[Entry] = []
        if rl.reuse:
            again = self._buffer.draw(
                rl.reuse, fresh=len(groups) - flat, version=self.version
            )
            old, _ = self._credit(again)
            for group in groups:
                self._buffer.add(group)
        entries = [*self._waiting, *fresh, *old]
        current = [entry for entry in entries if self._is_current(entry)]
        numbers |= {
            "groups": len(groups),
            "flat_groups": flat,
            "learned_trajectories": len(current),
            "reused_trajectories": len(old),
            "dropped_stale": len(entries) - len(current),
        }
        places = {(e.trajectory.group, e.trajectory.member): e for e in fresh}
        shown = [places.get((t.group, t.member), Entry(t, [])) for t in finished]
        return Lesson(current, shown, numbers)

    def learned(self, lesson: Lesson, left: Sequence[int]) -> None:
        """The iteration is over; trajectories `left` wait for the next one."""
        self._waiting = [lesson.entries[i] for i in left]
        self.iteration += 1

    def state(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "iteration": self.iteration,
            "sampler": self._sampler.state(),
            "gather": self._gather.state(),
            "buffer": self._buffer.state(),
            "waiting": [[e.trajectory.to_json(), e.advantages] for e in self._waiting],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Undoes `state`."""
        self.iteration = state["iteration"]
        self._sampler.restore(state["sampler"])
        self._gather.restore(state["gather"])
        self._buffer.restore(state["buffer"])
        self._waiting = [Entry(from_json(t), a) for t, a in state["waiting"]]

    def _credit(
        self, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[Entry], int]:
        """What is to be learned of whole groups, and how many teach nothing."""
        rl = self._rl
        trajectories = [t for group in groups for t in group]
        assigned = assign(
            trajectories,
            rl.advantage,
            turn_credit=rl.turn_credit,
            length_penalty=rl.length_penalty,
            length_budget=rl.length_budget,
        )
        rows = zip(trajectories, assigned.advantages, assigned.flat, strict=True)
        # A teacher has something to say about groups that are all alike too, and so
        # have rewards that are compared with nothing.
        every = rl.teacher or rl.advantage == "none"
        entries = [Entry(t, a.tolist()) for t, a, flat in rows if every or not flat]
        return entries, assigned.flat_groups

    def _is_current(self, entry: Entry) -> bool:
        drawn = min(entry.trajectory.versions, default=self.version)
        return self.version - drawn <= self._rl.max_staleness


def shuffled(
    groups: Sequence[Sequence[Trajectory]], seed: tuple[int, ...]
) -> list[list[Trajectory]]:
    """The groups with each other's rewards, given with the last turns.

    Chance alone decides who is better than whom: what is learned from it is noise.
    """
    pool = [t.reward for group in groups for t in group]
    rewards = iter(np.random.default_rng(seed).permutation(pool).tolist())
    return [[_paid(t, next(rewards)) for t in group] for group in groups]


def _paid(one: Trajectory, reward: float) -> Trajectory:
    """With this reward alone, for the last turn."""
    turns = [dataclasses.replace(turn, reward=0.0) for turn in one.turns]
    if turns:
        turns[-1] = dataclasses.replace(turns[-1], reward=reward)
    return dataclasses.replace(one, turns=turns)
