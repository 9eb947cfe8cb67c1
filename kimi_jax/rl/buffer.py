"""Groups of trajectories: put together, and kept for another use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.rl.trajectory import Trajectory, from_json

Group = list[Trajectory]


class Gather:
    """Puts groups together whose members finish in different runs.

    Args:
      size: members of a group.
    """

    def __init__(self, size: int):
        self.size = size
        self._parts: dict[int, Group] = {}

    def add(self, trajectories: Iterable[Trajectory]) -> list[Group]:
        """The groups that these complete, members in order."""
        whole = []
        for trajectory in trajectories:
            part = self._parts.setdefault(trajectory.group, [])
            part.append(trajectory)
            if len(part) == self.size:
                del self._parts[trajectory.group]
                whole.append(sorted(part, key=lambda member: member.member))
        return whole

    def state(self) -> list[dict[str, Any]]:
        """Plain JSON values, exactly."""
        return [member.to_json() for part in self._parts.values() for member in part]

    def restore(self, state: Iterable[dict[str, Any]]) -> None:
        """Go on from `state`."""
        self._parts = {}
        self.add(map(from_json, state))


class Buffer:
    """The last groups, for reuse while they are not too old.

    Groups whose members all have the same reward are not kept: they teach nothing.

    Args:
      capacity: groups; the oldest make room.
      max_staleness: most versions by which the policy may have moved on since the
        first token of a group was drawn.
      seed: of `draw`.

    Raises:
      UserError: a value out of its range.
    """

    def __init__(self, capacity: int, max_staleness: int, seed: int):
        for name, value in (("capacity", capacity), ("max_staleness", max_staleness)):
            if value < 0:
                raise UserError(f"{name}={value}: must be at least 0")
        self.capacity, self.max_staleness, self.seed = capacity, max_staleness, seed
        self.groups: list[Group] = []
        self._draws = 0

    def add(self, group: Group) -> bool:
        """Keep a group; False: its rewards are all the same."""
        if len({trajectory.reward for trajectory in group}) < 2:
            return False
        self.groups = [*self.groups, group][-self.capacity :] if self.capacity else []
        return True

    def draw(self, share: float, *, fresh: int, version: int) -> list[Group]:
        """Old groups that make up `share` of a batch beside `fresh` new ones.

        None comes twice in one draw. Drops what is too stale for `version` first; what
        is left may be fewer than the share wants.

        Raises:
          UserError: a share that is none, or that leaves nothing to new groups.
        """
        if not 0 <= share < 1:
            raise UserError(f"share={share}: must be in [0, 1)")
        self.groups = [g for g in self.groups if self._is_fresh(g, version)]
        rng = np.random.default_rng((self.seed, self._draws))
        self._draws += 1
        wanted = round(fresh * share / (1 - share))
        chosen = rng.permutation(len(self.groups))[:wanted]
        return [self.groups[index] for index in sorted(chosen)]

    def state(self) -> dict[str, Any]:
        """Plain JSON values, exactly."""
        groups = [[member.to_json() for member in group] for group in self.groups]
        return {"draws": self._draws, "groups": groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; a smaller capacity keeps the newest."""
        self._draws = state["draws"]
        self.groups = []
        for group in state["groups"]:
            self.add([from_json(member) for member in group])

    def _is_fresh(self, group: Group, version: int) -> bool:
        oldest = min((v for t in group for v in t.versions), default=version)
        return version - oldest <= self.max_staleness
