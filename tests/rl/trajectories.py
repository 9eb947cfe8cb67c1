"""Trajectories for tests of what learns from them, drawn by numpy."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Turn:
    start: int
    stop: int
    reward: float


@dataclasses.dataclass
class Trajectory:
    group: int
    tokens: list
    turns: list
    logprobs: list
    routes: np.ndarray | None = None


def draw(rng, turns, group=0, routes=None, rewards=None):
    """A prompt, then turns of the policy with an answer after each but the last.

    Args:
      turns: tokens of each turn.
      routes: (L, A, experts); None: no routes.
    """
    spans, end = [], int(rng.integers(2, 5))
    rewards = rng.normal(size=len(turns)) if rewards is None else rewards
    for i, (size, reward) in enumerate(zip(turns, rewards, strict=True)):
        spans.append(Turn(end, end + size, float(reward)))
        end += size + (int(rng.integers(1, 4)) if i < len(turns) - 1 else 0)
    chosen = None
    if routes is not None:
        L, A, experts = routes
        drawn = rng.random((end - 1, L, experts)).argsort(-1)
        chosen = drawn[..., :A].astype(np.int32)
    tokens = rng.integers(0, 256, end).tolist()
    logprobs = (-rng.exponential(4.0, sum(turns))).tolist()
    return Trajectory(group, tokens, spans, logprobs, chosen)
