"""What a run of reinforcement learning knows besides its parameters.

Which tasks succeed how often, groups whose members have not all finished, trajectories
that found no room in the rows of an iteration, and old ones that are learned again. All
of it is plain values, in every checkpoint.
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
from kimi_jax.rl.buffer import Buffer
from kimi_jax.rl.task_sampler import TaskSampler
from kimi_jax.rl.trajectory import Trajectory, Turn, from_json
from kimi_jax.tasks.specs import Spec


class Lesson(NamedTuple):
    """What an iteration learns.

    Attributes:
      entries: trajectories with their advantages, in the order of their claim to room.
      archived: all that finished, for the files.
      numbers: for the "rl" field of the record.
    """

    entries: list[Entry]
    archived: list[Entry]
    numbers: dict[str, Any]


class Memory:
    """See the module.

    Attributes:
      iteration: finished ones.
    """

    def __init__(self, rl: RL, cells: Sequence[Spec], seed: int):
        self._rl, self._seed = rl, seed
        self.iteration = 0
        self._sampler = TaskSampler(cells, rl.sampler, seed)
        self._partial: dict[int, list[Trajectory]] = {}  # by group
        self._waiting: list[Entry] = []
        self._buffer = Buffer(rl.max_staleness)

    @property
    def version(self) -> int:
        """Of the policy: it changes once an iteration."""
        return self.iteration

    def draw(self) -> list[Task]:
        """The tasks of the groups that are new in this iteration."""
        return self._sampler.draw(self._rl.groups)

    def lesson(self, finished: Sequence[Trajectory]) -> Lesson:
        """Whole groups with their advantages, and what else there is room for."""
        rl = self._rl
        groups = self._whole(finished)
        for group in groups:
            self._sampler.update(group[0].task, float(np.mean([t.success for t in group])))
        numbers: dict[str, Any] = health.group_health(groups)
        fresh, flat = self._credit(groups)
        entries = [*self._waiting, *fresh, *self._again(len(fresh))]
        oldest = self.version - rl.max_staleness
        current = [e for e in entries if min(e.trajectory.versions, default=0) >= oldest]
        numbers |= {
            "groups": len(groups),
            "flat_groups": flat,
            "waiting_groups": len(self._partial),
            "dropped_stale": len(entries) - len(current),
            "learned_trajectories": len(current),
        }
        learned = {id(entry.trajectory): entry for entry in fresh}
        archived = [learned.get(id(t), Entry(t, [])) for t in finished]
        return Lesson(current, archived, numbers)

    def learned(self, lesson: Lesson, left: Sequence[int]) -> None:
        """The iteration is over; trajectories `left` wait for the next one."""
        self._waiting = [lesson.entries[i] for i in left]
        self.iteration += 1

    def state(self) -> dict[str, Any]:
        """All of it, as plain values and arrays."""
        return {
            "iteration": self.iteration,
            "sampler": self._sampler.state(),
            "buffer": self._buffer.state(),
            "partial": [t.to_json() for group in self._partial.values() for t in group],
            "waiting": [[e.trajectory.to_json(), e.advantages] for e in self._waiting],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Undoes `state`."""
        self.iteration = state["iteration"]
        self._sampler.restore(state["sampler"])
        self._buffer.restore(state["buffer"])
        self._partial = {}
        for values in state["partial"]:
            trajectory = from_json(values)
            self._partial.setdefault(trajectory.group, []).append(trajectory)
        self._waiting = [Entry(from_json(t), a) for t, a in state["waiting"]]

    def _whole(self, finished: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """The groups that are whole now, by their number; the others wait here."""
        for trajectory in finished:
            self._partial.setdefault(trajectory.group, []).append(trajectory)
        numbers = sorted(
            n for n, t in self._partial.items() if len(t) == self._rl.group_size
        )
        groups = [self._partial.pop(number) for number in numbers]
        return [sorted(group, key=lambda t: t.member) for group in groups]

    def _credit(
        self, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[Entry], int]:
        """What is to be learned of whole groups, and how many teach nothing."""
        rl = self._rl
        trajectories = [t for group in groups for t in group]
        rewarded = trajectories
        if rl.rewards == "shuffled":
            rewarded = shuffled(trajectories, (self._seed, self.iteration))
        assigned = assign(
            rewarded,
            rl.advantage,
            turn_credit=rl.turn_credit,
            length_penalty=rl.length_penalty,
            length_budget=rl.length_budget,
        )
        # A teacher has something to say about groups that are all alike too.
        entries = [
            Entry(t, credit.tolist())
            for t, credit, flat in zip(
                trajectories, assigned.advantages, assigned.flat, strict=True
            )
            if rl.teacher or not flat
        ]
        return entries, assigned.flat_groups


def shuffled(
    trajectories: Sequence[Trajectory], seed: tuple[int, ...]
) -> list[Trajectory]:
    """The trajectories with each other's rewards, given with their last turns."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(trajectories)).tolist()
    return [
        dataclasses.replace(t, turns=_paid(t.turns, trajectories[i].reward))
        for t, i in zip(trajectories, order, strict=True)
    ]


def _paid(turns: Sequence[Turn], reward: float) -> list[Turn]:
    without = [dataclasses.replace(turn, reward=0.0) for turn in turns]
    if without:
        without[-1] = dataclasses.replace(without[-1], reward=reward)
    return without
