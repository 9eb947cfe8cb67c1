"""What an environment is. A custom one is a class with these three methods.

    tokens = environment.reset(task)          the prompt; the policy's turn begins
    step = environment.step(turn)             its turn; step.tokens come before the next
    turn = environment.expert()               a right turn from here, by script

An environment is deterministic by task: the same turns give the same steps, so that
replaying the turns through a fresh one restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kimi_jax.tasks.example import STREAMS, Stream


class Task(NamedTuple):
    """One task; hashable, and a JSON list of its fields says it all.

    Attributes:
      environment: the spec of its environment without difficulty and length, such as
        "tools" or "tools:process=1".
      length: most tokens of the expert's episode.
    """

    environment: str
    difficulty: int
    length: int
    seed: int


class Step(NamedTuple):
    """What a turn of the policy leads to.

    Attributes:
      tokens: what the policy reads next, up to where its turn begins; [] when done.
      reward: process reward of this turn and, when done, the final one in [0, 1].
      info: when done, "success" says whether the task is solved; "error" is the
        fault of an environment (`episodes.guard`).
    """

    tokens: list[int]
    reward: float
    done: bool
    info: dict[str, Any]


class Environment(Protocol):
    """See the module."""

    def reset(self, task: Task) -> list[int]:
        """The prompt, up to where the policy's turn begins.

        Raises:
          UserError: there is no such task.
        """

    def step(self, tokens: Sequence[int]) -> Step:
        """Takes the policy's turn, its end token included if it wrote one."""

    def expert(self) -> list[int]:
        """A right turn from here, end token included."""


@runtime_checkable
class Fallible(Protocol):
    """An environment that can also say what a careless policy would do."""

    def mistake(self, rng: np.random.Generator, closing: bool) -> list[int]:
        """A wrong turn from here.

        Args:
          closing: True: one that heads for a failure, so that turns of this kind end
            the episode unsolved; False: one from which the expert can still succeed.
        """


def seed_of(stream: Stream, seed: int, *index: int) -> int:
    """The seed of task `index` of a stream, 0 to 2^62 - 1.

    Streams ("training", "validation", "evaluation") share no seed but by chance.
    """
    entropy = (seed, STREAMS.index(stream), *index)
    (state,) = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(state >> np.uint64(2))
