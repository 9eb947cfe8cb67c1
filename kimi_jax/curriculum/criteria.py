"""When a stage has done its work: criteria over what was held out from it.

    loss_slope       the held-out loss falls by at most this many nats while the tokens
                     of the stage double; a line through the evaluations of its second
                     half, which is one doubling
    position_gap     the last positions of a row (its second half, where the length is a
                     power of two) lose at most this many nats more than all positions
                     before them; negative: they must be better, having more to read
    validation_loss  the held-out loss is at most this, in nats a token
    needle_recall    of the numbers hidden in filler as long as a row of the stage, the
                     model finds at least this share (`tasks.needles`, one needle)

Only evaluations count. Unlike averages of training steps they fall on the same steps
and have the same bits in a run that was stopped and resumed, and so has the verdict.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from kimi_jax.config import Train

NEEDLE = "needle_recall"
NAMES = ("loss_slope", "position_gap", "validation_loss", NEEDLE)
_LEAST_EVALUATIONS = 3  # for a line with an error

Evaluations = Mapping[int, Mapping[str, Any]]  # step -> "eval" record


class Verdict(NamedTuple):
    """What follows a round, and why; one line a criterion."""

    action: Literal["advance", "stay", "stop"]
    reasons: tuple[str, ...]


def judge(
    until: Mapping[str, float],
    evaluations: Evaluations,
    length: int,
    rounds_left: int,
    recall: float = math.nan,
) -> Verdict:
    """The verdict on a stage whose last evaluation was at its last step.

    Args:
      length: of a row, in tokens.
      rounds_left: how often the stage may go on.
      recall: share of the needles found, if it is a criterion.
    """
    if not until:
        return Verdict("advance", ("its tokens are used, and no criterion was asked",))
    lines, met = [], True
    for name, limit in until.items():
        value = recall if name == NEEDLE else measure(name, evaluations, length)
        # Not a number holds nothing.
        holds = value >= limit if name == NEEDLE else value <= limit
        met &= holds
        lines.append(f"{name} {value:.4g}, {'met' if holds else 'not met'}: {limit:g}")
    if met:
        return Verdict("advance", tuple(lines))
    if rounds_left > 0:
        return Verdict("stay", (*lines, f"rounds left: {rounds_left}"))
    return Verdict("stop", (*lines, "rounds left: 0"))


def measure(name: str, evaluations: Evaluations, length: int) -> float:
    """The number that a criterion limits; NaN if the evaluations do not tell it."""
    last = evaluations[max(evaluations)]
    if name == "loss_slope":
        return loss_slope(evaluations)
    if name == "position_gap":
        return position_gap(last["lengths"][str(length)], length)
    return float(last["loss"])


def loss_slope(evaluations: Evaluations) -> float:
    """Nats that the loss falls by while the tokens double, over the second half."""
    end = max(evaluations)
    steps = [step for step in sorted(evaluations) if 2 * step >= end]
    if len(steps) < _LEAST_EVALUATIONS:
        return math.nan
    losses = [evaluations[step]["loss"] for step in steps]
    return -float(np.polyfit(np.log2(steps), losses, 1)[0])


def position_gap(record: Mapping[str, Any], length: int) -> float:
    """Loss in the last bin of positions minus the loss in all bins before it, nats.

    Args:
      record: of windows of one length, as `evaluate.summarise` makes it.
    """
    losses, tokens = record["position_loss"], record["position_tokens"]
    early = [name for name in losses if int(name) < length]
    count = sum(tokens[name] for name in early)
    if str(length) not in losses or not count:
        return math.nan
    before = sum(losses[name] * tokens[name] for name in early) / count
    return float(losses[str(length)] - before)


def problems(until: Any) -> Iterator[str]:
    """Criteria that do not exist or can never be met."""
    if not isinstance(until, Mapping):
        yield f"until={until!r}: write a dict, such as {{'loss_slope': 0.02}}"
        return
    for name, limit in until.items():
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"until: {name!r} is not one of {list(NAMES)}{hint}"
        elif not isinstance(limit, int | float) or not math.isfinite(limit):
            unit = "a share" if name == NEEDLE else "a number of nats"
            yield f"until: {name}={limit!r}: must be {unit}"
        elif name == NEEDLE and not 0 < limit <= 1:
            yield f"until: {name}={limit}: must be a share, above 0 and at most 1"
        elif name != "position_gap" and limit <= 0:
            why = "a loss is positive"
            if name == "loss_slope":
                why = "a loss that still falls would never end the stage"
            yield f"until: {name}={limit}: can never be met, as {why}; raise it"


def misfits(until: Mapping[str, float], train: Train) -> Iterator[str]:
    """Criteria for which a stage evaluates too seldom."""
    every, steps = train.eval_every, train.steps
    found = {s for s in range(every, steps + 1, every) if 2 * s >= steps} | {steps}
    if "loss_slope" in until and len(found) < _LEAST_EVALUATIONS:
        yield (
            f"until: loss_slope can never be met with config.train.eval_every={every}: "
            f"the second half of {steps} steps has {len(found)} evaluations, and a "
            f"line needs {_LEAST_EVALUATIONS}; use {max(1, steps // 4)} or less"
        )
