"""Environments and rewards that a careless person might write."""

from collections.abc import Sequence
from typing import Any

from kimi_jax.environments.environment import Step, Task
from kimi_jax.environments.format import Format


class Faulty:
    """Counts to `turns`; at turn 1 it does what `fault` says."""

    def __init__(self, form: Format, fault: str = "none", turns: int = 2):
        self.form, self.fault, self.turns = form, fault, turns

    def reset(self, task: Task) -> list[int]:
        self.taken = 0
        if self.fault == "reset":
            raise KeyError("nothing there")
        if self.fault == "empty":
            return []
        return self.form.open("assistant")

    def step(self, tokens: Sequence[int]) -> Step:
        self.taken += 1
        done = self.taken == self.turns
        step = Step([65, *self.form.open("assistant")], 0.0, done, {"success": done})
        return self.strange(step) if self.taken == 1 else step

    def strange(self, step: Step) -> Any:
        match self.fault:
            case "raise":
                raise ZeroDivisionError("oh")
            case "none given":
                return None
            case "nan":
                return step._replace(reward=float("nan"))
            case "infinite":
                return step._replace(reward=float("inf"))
            case "no number":
                return step._replace(reward="much")
            case "outside":
                return step._replace(tokens=[272])
            case "negative":
                return step._replace(tokens=[-1])
            case "text":
                return step._replace(tokens="hello")
            case "fractions":
                return step._replace(tokens=[0.5])
            case "silence":
                return step._replace(tokens=[])
            case "flood":
                return step._replace(tokens=[65] * 1001)
            case "no info":
                return step._replace(info=None)
        return step

    def expert(self) -> list[int]:
        return self.form.close("x")


class NoDefaults:
    """Its dial has no default."""

    def __init__(self, form: Format, size):
        self.size = size


def half(task: Task, steps: Sequence[Step]) -> float:
    """Half of the environment's reward, less 0.01 for each turn so far."""
    return 0.5 * steps[-1].reward - 0.01 * len(steps)


def wrong(task: Task, steps: Sequence[Step]) -> float:
    return float("nan")
