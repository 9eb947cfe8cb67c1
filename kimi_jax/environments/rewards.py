"""A reward of one's own, around any environment.

    def brief(task: Task, steps: Sequence[Step]) -> float:
        return steps[-1].reward - 0.01 * len(steps)

    environment = Rewarded(Tools(form), brief)

or, in a spec, `tools:reward=package.module.brief`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kimi_jax.environments.environment import Environment, Fallible, Step, Task
from kimi_jax.errors import UserError

# Of the task and all steps so far, the reward of the last; that step says what the
# environment itself would give, and in its info what the policy has said.
Reward = Callable[[Task, Sequence[Step]], float]


@dataclasses.dataclass
class Rewarded:
    """The environment with rewards of `function` in place of its own."""

    environment: Environment
    function: Reward

    def reset(self, task: Task) -> list[int]:
        self._task, self._steps = task, list[Step]()
        return self.environment.reset(task)

    def step(self, tokens: Sequence[int]) -> Step:
        step = self.environment.step(tokens)
        self._steps.append(step)
        return step._replace(reward=self.function(self._task, tuple(self._steps)))

    def expert(self) -> list[int]:
        return self.environment.expert()

    def mistake(self, rng: np.random.Generator, closing: bool) -> list[int]:
        return mistaken(self.environment).mistake(rng, closing)


def mistaken(environment: Environment) -> Fallible:
    """The environment as one that knows mistakes.

    Raises:
      UserError: it has none.
    """
    inner = environment
    while isinstance(inner, Rewarded):
        inner = inner.environment
    if isinstance(environment, Fallible) and isinstance(inner, Fallible):
        return environment
    raise UserError(
        f"the environment {type(inner).__name__} has no method mistake(rng, "
        "closing), which noise and skill need; write one, or leave both out"
    )
