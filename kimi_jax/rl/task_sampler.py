"""Which tasks to play next, by what the policy can do so far.

A cell is an environment at one difficulty and one length. How often it is drawn
depends on its success, a running mean over the groups that were played:

    weight
      1 |        ________        not tried yet: 1
        |      /          \\
    floor|____/            \\__
        0    low   high    1     success

Within the target band a group has members that succeed and others that fail, which is
what group-relative advantages live on. The floor keeps hard tasks in play, so that it
is noticed when they become possible, and easy ones, so that it is noticed when they are
forgotten. A longer cell is locked until the next shorter one of its environment and
difficulty has reached a threshold once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kimi_jax.config import TaskSampling
from kimi_jax.environments.environment import Task, seed_of
from kimi_jax.errors import UserError


class Cell(NamedTuple):
    """A kind of task: all of a `Task` but the seed."""

    environment: str
    difficulty: int
    length: int

    @classmethod
    def of(cls, task: Task) -> Cell:
        return cls(task.environment, task.difficulty, task.length)


class TaskSampler:
    """Draws tasks for training. What it draws depends on its arguments and on the
    updates so far.

    Args:
      cells: at least one, each once.
      seed: of the choice among cells and of the tasks themselves, whose seeds are of
        the stream "training" (`seed_of`). Held-out tasks are of other streams.

    Attributes:
      success: of each cell that was played.

    Raises:
      UserError: no cells, or one twice.
    """

    def __init__(self, cells: Sequence[Cell], seed: int, settings: TaskSampling):
        self.cells = [Cell(*cell) for cell in cells]
        if not self.cells or len(set(self.cells)) < len(self.cells):
            twice = next((c for c in self.cells if self.cells.count(c) > 1), None)
            raise UserError(
                "no tasks to draw; name an environment"
                if twice is None
                else f"the tasks {twice} are named twice; name them once"
            )
        self.settings, self.seed = settings, seed
        self.success: dict[Cell, float] = {}
        self._opened: set[Cell] = set()  # those that the threshold has unlocked
        self._drawn = 0  # tasks

    def unlocked(self) -> list[Cell]:
        """The cells that may be drawn; the shortest of each kind always."""
        return [cell for cell in self.cells if self._is_unlocked(cell)]

    def weights(self) -> np.ndarray:
        """How often each of `cells` is drawn; they sum to 1."""
        weight_C = np.array([self._weight(cell) for cell in self.cells])
        return weight_C / weight_C.sum()

    def draw(self, count: int) -> list[Task]:
        """The next tasks, in an order of their own.

        Cells come as often as their weights say, to within one: not by independent
        draws, whose counts vary more.
        """
        rng = np.random.default_rng((self.seed, self._drawn))
        places_N = (rng.random() + np.arange(count)) / max(count, 1)
        cell_N = np.searchsorted(np.cumsum(self.weights()), places_N, side="right")
        tasks = []
        for index in rng.permutation(np.minimum(cell_N, len(self.cells) - 1)):
            seed = seed_of("training", self.seed, self._drawn)
            tasks.append(Task(*self.cells[int(index)], seed))
            self._drawn += 1
        return tasks

    def update(self, task: Task, success_rate: float) -> None:
        """Learn the share of a group's members that succeeded.

        Raises:
          UserError: no share, or a task of no cell.
        """
        cell = Cell.of(task)
        if cell not in self.cells:
            raise UserError(f"{cell} is not among the tasks that are drawn")
        if not 0 <= success_rate <= 1:
            raise UserError(f"success_rate={success_rate}: must be in [0, 1]")
        ema, rate = self.settings.ema, float(success_rate)
        before = self.success.get(cell, rate)
        self.success[cell] = ema * before + (1 - ema) * rate
        if self.success[cell] >= self.settings.length_threshold:
            longer = [c for c in self._kind(cell) if c.length > cell.length]
            self._opened |= set(longer[:1])

    def state(self) -> dict[str, Any]:
        """Plain JSON values; floats come back to the bit."""
        return {
            "seed": self.seed,
            "drawn": self._drawn,
            "success": [[*cell, rate] for cell, rate in self.success.items()],
            "opened": sorted([*cell] for cell in self._opened),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Cells that are new begin untried, others are forgotten.

        Raises:
          UserError: it is of another seed.
        """
        if state["seed"] != self.seed:
            raise UserError(
                f"seed={self.seed}, but the tasks were drawn with "
                f"seed={state['seed']}; go on with that"
            )
        rates = {Cell(*cell): rate for *cell, rate in state["success"]}
        self._drawn = state["drawn"]
        self.success = {cell: r for cell, r in rates.items() if cell in self.cells}
        self._opened = {Cell(*cell) for cell in state["opened"]} & set(self.cells)

    def _kind(self, cell: Cell) -> list[Cell]:
        """The cells that differ in length alone, the shortest first."""
        same = [c for c in self.cells if c[:2] == cell[:2]]
        return sorted(same, key=lambda c: c.length)

    def _is_unlocked(self, cell: Cell) -> bool:
        free = self.settings.length_threshold == 0 or self._kind(cell)[0] == cell
        return free or cell in self._opened

    def _weight(self, cell: Cell) -> float:
        if not self._is_unlocked(cell):
            return 0.0
        rate, s = self.success.get(cell), self.settings
        if rate is None:
            return 1.0
        inside = min(rate / s.target_low, (1 - rate) / (1 - s.target_high), 1.0)
        return s.floor + (1 - s.floor) * max(inside, 0.0)


def held_out(cells: Sequence[Cell], count: int, seed: int = 0) -> list[Task]:
    """`count` tasks of each cell to measure a policy with, the same in every run.

    Their seeds are of the stream "evaluation", which shares none with training.
    """
    return [
        Task(*cell, seed_of("evaluation", seed, index))
        for cell in cells
        for index in range(count)
    ]
