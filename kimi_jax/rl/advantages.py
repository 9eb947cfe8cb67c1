"""From the rewards of a group to the credit of each turn, on the host.

A group is several trajectories of one task. What its members got on average is the
baseline, so no value model is learned. Letters: G members of a group, N turns of one.

    kind           advantage of member i
    mean           r_i - mean(r)                       Dr. GRPO
    mean_std       (r_i - mean(r)) / std(r)            GRPO
    leave_one_out  r_i - mean of the others' rewards   RLOO
    none           r_i

A reward that is not finite enters no baseline; its member's advantage is nan, by which
`kimi_jax.rl.experience` drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.rl.trajectory import Trajectory

KINDS = ("mean", "mean_std", "leave_one_out", "none")
# Rewards this close, in the units of rewards, are one reward and rounding.
_EQUAL = 1e-9


class Assigned(NamedTuple):
    """Credit of a list of trajectories.

    Attributes:
      advantages: float64 [N] of each trajectory, one value a turn.
      flat: bool, for each trajectory whether its group teaches nothing: all its finite
        rewards are alike.
      groups, flat_groups: how many there are.
    """

    advantages: list[np.ndarray]
    flat: np.ndarray
    groups: int
    flat_groups: int


def assign(
    trajectories: Sequence[Trajectory],
    kind: str,
    *,
    turn_credit: float = 0.0,
    length_penalty: float = 0.0,
    length_budget: int = 1,
) -> Assigned:
    """The credit of every turn of every trajectory, group by group.

    Args:
      kind: see the top of this file.
      turn_credit: c in (1 - c) A_i + c A_in: the share of the advantage that compares
        what member i got from turn n on, and not all of its reward.
      length_penalty, length_budget: see `penalty`.

    Raises:
      UserError: unknown kind, or turn_credit outside [0, 1].
    """
    if not 0 <= turn_credit <= 1:
        raise UserError(f"turn_credit={turn_credit}: a share, in [0, 1]")
    found: list[np.ndarray] = [np.zeros(0)] * len(trajectories)
    flat = np.zeros(len(trajectories), bool)
    members: dict[int, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group, []).append(index)
    flat_groups = 0
    for indices in members.values():
        rewards = []
        for i in indices:
            turns = trajectories[i].turns
            rewards.append(np.array([turn.reward for turn in turns], float))
            if turns:
                written = sum(turn.stop - turn.start for turn in turns)
                rewards[-1][-1] -= penalty(written, length_penalty, length_budget)
        whole_G = advantages([own.sum() for own in rewards], kind)
        turns_G = turn_advantages(rewards, kind)
        none = is_flat(rewards if turn_credit else [[own.sum()] for own in rewards])
        flat_groups += none
        for i, whole, own_N in zip(indices, whole_G, turns_G, strict=True):
            found[i] = np.full(len(own_N), whole)
            if turn_credit:
                found[i] = (1 - turn_credit) * whole + turn_credit * own_N
            flat[i] = none
    return Assigned(found, flat, len(members), flat_groups)


def advantages(rewards_G: Sequence[float] | np.ndarray, kind: str) -> np.ndarray:
    """Float64 [G]: how much better than the group each member did.

    Members without others to compare with, and those of a group of equal rewards, get 0
    from all kinds but "none".

    Raises:
      UserError: unknown kind.
    """
    if kind not in KINDS:
        raise UserError(f"advantage={kind!r}: choose one of {', '.join(KINDS)}")
    rewards_G = np.asarray(rewards_G, float)
    there_G = np.isfinite(rewards_G)
    found_G = np.full(len(rewards_G), np.nan)
    r = rewards_G[there_G]
    if kind == "none" or not len(r):
        found_G[there_G] = r
        return found_G
    above = r - r.mean()
    if np.ptp(r) <= _EQUAL:
        above = np.zeros_like(r)
    elif kind == "mean_std":
        above /= r.std()
    elif kind == "leave_one_out":
        above *= len(r) / (len(r) - 1)
    found_G[there_G] = above
    return found_G


def turn_advantages(
    rewards: Sequence[Sequence[float] | np.ndarray], kind: str
) -> list[np.ndarray]:
    """[N] of each member: what it got from a turn on, against those who came as far.

    The return of turn n is the sum of the rewards of turns n, n + 1, ...; the baseline
    of turn n is over the members that have such a turn.
    """
    returns = [np.cumsum(np.asarray(own, float)[::-1])[::-1] for own in rewards]
    found = [np.zeros(len(own)) for own in returns]
    for n in range(max(map(len, returns), default=0)):
        here = [i for i, own in enumerate(returns) if len(own) > n]
        at_n = advantages([returns[i][n] for i in here], kind)
        for i, value in zip(here, at_n, strict=True):
            found[i][n] = value
    return found


def is_flat(rewards: Sequence[Sequence[float] | np.ndarray]) -> bool:
    """Whether the members' finite rewards, turn by turn, are all alike."""
    finite = [own for own in rewards if np.all(np.isfinite(own))]
    if len({len(own) for own in finite}) > 1:
        return False
    return all(np.ptp(column) <= _EQUAL for column in zip(*finite, strict=True))


def penalty(tokens: int, most: float, budget: int) -> float:
    """What a trajectory of so many policy tokens loses of its reward.

    Nothing up to `budget`, `most` from twice the budget on, in between in proportion:
    the soft punishment of over-long answers of DAPO.
    """
    if budget < 1:
        raise UserError(f"length_budget={budget}: tokens, at least 1")
    return most * float(np.clip((tokens - budget) / budget, 0, 1))
