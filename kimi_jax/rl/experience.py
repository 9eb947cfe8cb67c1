"""Trajectories as rows of arrays, ready for a step.

A trajectory is kept whole, as one document of a row: what its tokens saw in the sampler
they see in the learner. Position t holds token t as input and token t + 1 as target;
what belongs to a policy token (its weight, advantage, log-probabilities) stands where
it is the target, the experts where it is the input.

What is not finite is dropped here, on the host, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kimi_jax.data.packing import best_fit_decreasing
from kimi_jax.rl.trajectory import Trajectory


class Experience(NamedTuple):
    """Rows of a step; segment 0 is padding, each other segment of a row a trajectory.

    Log-probabilities are those of the targets, in nats. `old`, `reference` and
    `teacher` come from `kimi_jax.rl.step.make_score`, by `_replace`.
    """

    tokens_BT: Any  # int32
    targets_BT: Any  # int32
    segment_ids_BT: Any  # int32, from 1 in each row
    weights_BT: Any  # float32: 1 for a target that the policy wrote, else 0
    advantages_BT: Any
    behaviour_BT: Any  # under the sampler, when it was drawn
    reference_BT: Any = None  # under the policy that is not to be left
    routes_BTLA: Any = None  # int32, experts to replay; all num_experts: free choice
    old_BT: Any = None  # under the learner before its steps; None: as behaviour
    teacher_BT: Any = None  # under the policy to be learned from


class Packed(NamedTuple):
    """Batches of equal shape, on the host.

    Attributes:
      batches: numpy arrays.
      used: numbers of the trajectories in them.
      left: numbers of those that had no room.
      dropped: {reason: how many} of the others.
    """

    batches: list[Experience]
    used: list[int]
    left: list[int]
    dropped: dict[str, int]


def make_experience(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray | float],
    seq_len: int,
    batch_size: int,
    *,
    batches: int | None = None,
    replay: tuple[int, int, int] | None = None,
) -> Packed:
    """Packs whole trajectories into rows, best fit, long ones first.

    Rows are dealt to the batches one by one, so that each has long and short ones; what
    is left of a batch is padding.

    Args:
      advantages: for each trajectory, one value or one for each of its turns.
      seq_len: T; a trajectory of n tokens takes n - 1 positions.
      batch_size: rows of a batch.
      batches: how many to make; None: as many as the rows fill.
      replay: (L, A, num_experts) of the model, to hand on what experts the sampler
        chose; None: `routes_BTLA` is None.

    Returns:
      See `Packed`. Reasons to drop: "empty", nothing in it was written by the policy;
      "not_finite", a reward, an advantage or a log-probability; "too_long".

    Raises:
      ValueError: lists that do not belong together.
    """
    dropped = dict.fromkeys(("empty", "not_finite", "too_long"), 0)
    kept = []
    for index, (one, credit) in enumerate(zip(trajectories, advantages, strict=True)):
        _check(one, replay)
        reason = _unfit(one, credit, seq_len)
        if reason is None:
            kept.append(index)
        else:
            dropped[reason] += 1
    sizes_P = np.array([len(trajectories[i].tokens) - 1 for i in kept], np.int64)
    rows_P = best_fit_decreasing(sizes_P, seq_len)
    rows = int(rows_P.max(initial=-1)) + 1
    count = max(-(-rows // batch_size), 1) if batches is None else batches
    made = [_blank(batch_size, seq_len, replay) for _ in range(count)]
    ends = np.zeros((count, batch_size, 2), np.int64)  # position and segment reached
    used, left = [], []
    for index, row in zip(kept, rows_P.tolist(), strict=True):
        batch, place = row % count, row // count
        if place >= batch_size:
            left.append(index)
            continue
        used.append(index)
        ends[batch, place, 1] += 1
        at, segment = ends[batch, place].tolist()
        _write(made[batch], place, at, segment, trajectories[index], advantages[index])
        ends[batch, place, 0] += len(trajectories[index].tokens) - 1
    return Packed(made, used, left, dropped)


def on_mesh(
    experience: Experience, rows: jax.sharding.NamedSharding | None = None
) -> Experience:
    """The host's arrays, which every process holds whole, as arrays over the mesh.

    Args:
      rows: `sharding.batch_sharding` of the mesh; None: one device.
    """

    def place(x: np.ndarray) -> jax.Array:
        if rows is None:
            return jax.device_put(x)
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    return jax.tree.map(place, experience)


def experience_shape(
    seq_len: int,
    batch_size: int,
    rows: jax.sharding.NamedSharding,
    *,
    replay: tuple[int, int, int] | None = None,
    scored: Sequence[str] = (),
) -> Experience:
    """What a step is compiled for.

    Args:
      rows: as in `on_mesh`.
      replay: as in `make_experience`.
      scored: the optional log-probabilities that it has, by field.
    """
    shape = (batch_size, seq_len)

    def array(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=rows)

    ids, reals = [array(np.int32)] * 3, [array(np.float32)] * 3
    routes = None if replay is None else array(np.int32, *replay[:2])
    found = Experience(*ids, *reals)._replace(routes_BTLA=routes)
    return found._replace(**{name: array(np.float32) for name in scored})


def _check(one: Trajectory, replay: tuple[int, int, int] | None) -> None:
    """Raises ValueError unless the lists of a trajectory belong together."""
    written = sum(turn.stop - turn.start for turn in one.turns)
    if len(one.logprobs) != written:
        raise ValueError(
            f"a trajectory of {written} policy tokens has {len(one.logprobs)} "
            "log-probabilities; there must be one for each"
        )
    end = 1
    for turn in one.turns:
        if not end <= turn.start <= turn.stop <= len(one.tokens):
            raise ValueError(
                f"a turn spans tokens {turn.start} to {turn.stop} of "
                f"{len(one.tokens)}, after one that ends at {end}; turns are in order, "
                "apart, and after at least one token of a prompt"
            )
        end = turn.stop
    if replay is None or one.routes is None:
        return
    L, A, experts = replay
    shape = (len(one.tokens) - 1, L, A)
    routes = np.asarray(one.routes)
    if routes.shape != shape:
        raise ValueError(
            f"the routes of a trajectory have shape {routes.shape}, expected {shape}: "
            "experts of every token but the last, by the same model"
        )
    if routes.size and not 0 <= routes.min() <= routes.max() <= experts:
        raise ValueError(
            f"routes name experts {routes.min()} to {routes.max()}, and there are "
            f"{experts}; record them with the same model"
        )


def _unfit(one: Trajectory, credit: np.ndarray | float, seq_len: int) -> str | None:
    if not one.logprobs:
        return "empty"
    rewards = [turn.reward for turn in one.turns]
    if not all(np.all(np.isfinite(x)) for x in (credit, one.logprobs, rewards)):
        return "not_finite"
    return "too_long" if len(one.tokens) - 1 > seq_len else None


def _blank(B: int, T: int, replay: tuple[int, int, int] | None) -> Experience:
    routes_BTLA = None
    if replay is not None:
        routes_BTLA = np.full((B, T, *replay[:2]), replay[2], np.int32)
    ids, reals = np.zeros((3, B, T), np.int32), np.zeros((3, B, T), np.float32)
    return Experience(*ids, *reals)._replace(routes_BTLA=routes_BTLA)


def _write(
    batch: Experience,
    row: int,
    at: int,
    segment: int,
    one: Trajectory,
    credit: np.ndarray | float,
) -> None:
    """Put a trajectory into a row, from position `at` on."""
    size = len(one.tokens) - 1
    here = slice(at, at + size)
    batch.tokens_BT[row, here] = one.tokens[:-1]
    batch.targets_BT[row, here] = one.tokens[1:]
    batch.segment_ids_BT[row, here] = segment
    done = 0
    credit_N = np.broadcast_to(np.asarray(credit, float), len(one.turns))
    for turn, value in zip(one.turns, credit_N, strict=True):
        span = slice(at + turn.start - 1, at + turn.stop - 1)
        count = turn.stop - turn.start
        batch.weights_BT[row, span] = 1
        batch.advantages_BT[row, span] = value
        batch.behaviour_BT[row, span] = one.logprobs[done : done + count]
        done += count
    if batch.routes_BTLA is not None and one.routes is not None:
        batch.routes_BTLA[row, here] = one.routes
