"""What rollouts are made of: limits, groups, members, and what a run has counted."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from kimi_jax.environments.environment import Environment, Task
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Job
from kimi_jax.infer.slots import Live
from kimi_jax.rl.trajectory import Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where a trajectory is cut off.

    Attributes:
      turn_tokens: of one turn. The environment is given the turn as it is.
      max_turns: "turns" if the environment is not done after so many.
      max_tokens: "tokens" if the prompt, a turn or an answer has no room in so many.
      max_calls: of `decode` in a run, which then ends; its trajectories go on in the
        next. None: until all have ended.
      seconds: of the clock on the wall while it was in a slot; "time" if it took more.
        Not deterministic, so for runaways alone. None: as long as it takes.

    Raises:
      UserError: a value out of its range.
    """

    turn_tokens: int
    max_turns: int
    max_tokens: int
    max_calls: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        least = {"turn_tokens": 1, "max_turns": 1, "max_tokens": 2, "max_calls": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if name == "max_calls" and value is None:
                continue
            if value < smallest:
                either = ", or None for no limit" if name == "max_calls" else ""
                raise UserError(f"{name}={value}: must be at least {smallest}{either}")
        if self.seconds is not None and not self.seconds > 0:
            raise UserError(
                f"seconds={self.seconds}: must be above 0, or None for no limit"
            )


@dataclasses.dataclass
class Statistics:
    """Of one run.

    Attributes:
      calls: of `decode`.
      drawn: tokens that the policy wrote.
      given: tokens of prompts, once a group, and of environments.
      decode_seconds, read_seconds, environment_seconds: where the time went; forks
        count as reading, and tokens that came with a call of `decode` as decoding.
      live_mean: sequences that a call of `decode` was for, on average.
      waiting: members that have not begun when the run ends.
      finished: how many trajectories ended for each reason.
    """

    calls: int = 0
    drawn: int = 0
    given: int = 0
    decode_seconds: float = 0.0
    read_seconds: float = 0.0
    environment_seconds: float = 0.0
    live_mean: float = 0.0
    waiting: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)

    def count_call(self, live: int) -> None:
        self.live_mean += (live - self.live_mean) / (self.calls + 1)
        self.calls += 1

    def close(self, finished: Iterable[str], waiting: int) -> None:
        self.finished = dict(collections.Counter(finished))
        self.waiting = waiting


@dataclasses.dataclass(eq=False)
class Group:
    """A task whose members have not all begun."""

    number: int
    task: Task
    size: int
    begun: int = 0  # members
    prompt: list[int] = dataclasses.field(default_factory=list)
    root: Live | None = None  # its prompt, once there was a slot
    first: Environment | None = None  # of member 0, which said what the prompt is


@dataclasses.dataclass(eq=False)
class Member:
    """A trajectory in a slot, in the middle of a turn.

    Attributes:
      start: where the turn begins.
      seconds: that it has spent in a slot.
    """

    trajectory: Trajectory
    environment: Environment
    sequence: Live
    job: Job
    start: int
    seconds: float = 0.0

    def so_far(self) -> Trajectory:
        """A copy, with the turn that is open as its last."""
        done, tokens = self.trajectory, list(self.sequence.tokens)
        turn = Turn(self.start, len(tokens), 0.0, {"open": True})
        return dataclasses.replace(
            done,
            tokens=tokens,
            turns=[*done.turns, turn],
            logprobs=list(done.logprobs),
            versions=list(done.versions),
        )
