"""What a policy did in one task, token by token.

A group is the trajectories of one task that share a group number; numbers count up over
a run. The tokens of a trajectory are the prompt, then turns of the policy and answers
of the environment in exchange.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from typing import Any, Literal

import numpy as np

from kimi_jax.environments.environment import Task
from kimi_jax.errors import UserError

# Why a trajectory ended. done: the environment said so. tokens, turns, time: a limit
# was met before. error: the environment failed. "": it has not ended.
Finished = Literal["", "done", "tokens", "turns", "time", "error"]
REASONS: tuple[Finished, ...] = ("done", "tokens", "turns", "time", "error")


@dataclasses.dataclass
class Turn:
    """What the policy wrote in one go, tokens[start:stop] of its trajectory.

    Attributes:
      reward: what the environment gave for it; the last one has the final reward too.
      info: of the environment, plain JSON values. "cut": a limit ended the turn before
        the policy did; "error": what the environment failed with; "open": the turn of
        an unfinished trajectory goes on.
    """

    start: int
    stop: int
    reward: float = 0.0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trajectory:
    """See the module.

    A trajectory without turns has no policy tokens: its prompt does not fit, or its
    environment has failed at once, maybe before there were any tokens.

    Attributes:
      member: its number in the group.
      logprobs: log-probability of each policy token, in order, under the policy that
        drew it, at temperature 1 (see `sampling.draw`).
      versions: of the policy that drew each policy token.
      routes: experts of every token but the last, int32 [len(tokens) - 1, L, A]; None:
        not recorded, or no token was read.
      finished: one of `Finished`.
    """

    task: Task
    group: int
    member: int
    tokens: list[int]
    turns: list[Turn] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    routes: np.ndarray | None = None
    finished: Finished = ""

    @property
    def reward(self) -> float:
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool:
        """Whether the environment said so as it ended."""
        if self.finished != "done" or not self.turns:
            return False
        return bool(self.turns[-1].info.get("success", False))

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes an equal trajectory to the bit."""
        values = {field.name: getattr(self, field.name) for field in _FIELDS}
        values["task"] = list(self.task)
        values["turns"] = [dataclasses.asdict(turn) for turn in self.turns]
        values["routes"] = None if self.routes is None else _pack(self.routes)
        return values


_FIELDS = dataclasses.fields(Trajectory)


def from_json(values: dict[str, Any]) -> Trajectory:
    """Inverts `Trajectory.to_json`, also after a round through JSON text.

    Raises:
      UserError: a value is missing, unknown or of a wrong kind.
    """
    try:
        routes = values["routes"]
        return Trajectory(
            **{
                **values,
                "task": Task(*values["task"]),
                "turns": [Turn(**turn) for turn in values["turns"]],
                "routes": None if routes is None else _unpack(routes),
            }
        )
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise UserError(
            f"not a trajectory ({error!r}); give what `Trajectory.to_json` has made, "
            "with the same version of the project"
        ) from error


def plain(info: Any) -> dict[str, Any]:
    """`info` of an environment as JSON takes it; what JSON has no word for, as text."""
    if not isinstance(info, dict):
        return {}
    return {str(name): _plain_value(value) for name, value in info.items()}


def _plain_value(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_scalar, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _pack(array: np.ndarray) -> dict[str, Any]:
    data = zlib.compress(np.ascontiguousarray(array, "<i4").tobytes(), 1)
    return {"shape": list(array.shape), "zlib": base64.b64encode(data).decode()}


def _unpack(packed: dict[str, Any]) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(packed["zlib"], validate=True))
    return np.frombuffer(data, "<i4").reshape(packed["shape"]).astype(np.int32)
