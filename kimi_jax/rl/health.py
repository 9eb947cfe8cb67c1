"""What the trajectories of an iteration say about its health (docs/rl.md).

Numbers for the records of a run: means over trajectories where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_jax.rl.trajectory import Trajectory

# Why a trajectory ended before its task did.
TRUNCATIONS = ("tokens", "turns", "time", "error")


def rollout_health(finished: Sequence[Trajectory], version: int) -> dict[str, Any]:
    """Of the trajectories that finished; empty if none did.

    Args:
      version: of the policy that learns from them.

    Returns:
      success, reward, turns, tokens, policy_tokens; policy_tokens_max; truncated (share
      by reason); environment_errors (share); staleness (mean versions since a token was
      drawn) and staleness_max; by_difficulty, by_length, by_environment (success).
    """
    if not finished:
        return {}
    drawn = [len(t.logprobs) for t in finished]
    ages = [version - v for t in finished for v in t.versions]
    return {
        "trajectories": len(finished),
        "success": _mean(t.success for t in finished),
        "reward": _mean(t.reward for t in finished),
        "turns": _mean(len(t.turns) for t in finished),
        "tokens": _mean(len(t.tokens) for t in finished),
        "policy_tokens": _mean(drawn),
        "policy_tokens_max": max(drawn),
        "truncated": {
            reason: _mean(t.finished == reason for t in finished)
            for reason in TRUNCATIONS
        },
        "environment_errors": _mean(map(has_error, finished)),
        "staleness": _mean(ages),
        "staleness_max": max(ages, default=0),
        **success_by(finished),
    }


def success_by(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Success by difficulty, by length and by environment."""
    return {
        "by_difficulty": _rates(trajectories, lambda t: t.task.difficulty),
        "by_length": _rates(trajectories, lambda t: t.task.length),
        "by_environment": _rates(trajectories, lambda t: t.task.environment),
    }


def group_health(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """zero_variance: share of the groups whose members have one reward; reward_spread:
    mean standard deviation within a group."""
    if not groups:
        return {}
    spreads = [float(np.std([t.reward for t in group])) for group in groups]
    return {
        "zero_variance": _mean(spread == 0.0 for spread in spreads),
        "reward_spread": _mean(spreads),
    }


def has_error(trajectory: Trajectory) -> bool:
    """Whether its environment failed, by exception, nonsense or limit."""
    failed = any("error" in turn.info for turn in trajectory.turns)
    return failed or trajectory.finished == "error"


def mean_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each number over the steps of an iteration."""
    names = records[0] if records else ()
    return {name: _mean(float(record[name]) for record in records) for name in names}


def _rates(
    trajectories: Sequence[Trajectory], key: Callable[[Trajectory], Any]
) -> dict[str, float]:
    found: dict[Any, list[bool]] = {}
    for trajectory in trajectories:
        found.setdefault(key(trajectory), []).append(trajectory.success)
    return {str(k): _mean(found[k]) for k in sorted(found)}


def _mean(values: Any) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed) if listed else math.nan
