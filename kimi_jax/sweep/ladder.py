"""A sweep in which compute grows: a law for each line, and what one gains on another.

The experiment file names the overrides along which compute grows, such as
LADDER = ("arg",). Runs that differ in nothing else, seeds apart, are a line. The first
line of the sweep is the base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.monitor import markdown
from kimi_jax.sweep import scaling_law
from kimi_jax.sweep.scaling_law import Law
from kimi_jax.sweep.settings import describe
from kimi_jax.sweep.table import Group

Fit = Callable[[np.ndarray, np.ndarray], Law]
FITS: dict[str, Fit] = {
    "power": scaling_law.fit_power,
    "offset": scaling_law.fit_offset,
}


class Ladder(NamedTuple):
    """Lines by name, in the order of the sweep."""

    points: dict[str, tuple[np.ndarray, np.ndarray]]  # FLOPs, held-out nats
    laws: dict[str, Law]
    problems: dict[str, str]  # why a line has no law


def climb(groups: Sequence[Group], along: Sequence[str], kind: str) -> Ladder:
    """The lines and their fits.

    Args:
      along: the overrides that make compute grow.
      kind: of law, a key of `FITS`.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        rest = {k: v for k, v in group.swept.items() if k not in along}
        line = found.setdefault(describe(rest), [])
        for result in group.results:
            loss = result.summary["validation_loss"]
            if loss is not None:
                line.append((result.flops, loss))
    points = {
        name: (np.array(line)[:, 0], np.array(line)[:, 1])
        for name, line in found.items()
        if line
    }
    laws, problems = {}, {}
    for name, (compute_N, loss_N) in points.items():
        try:
            laws[name] = FITS[kind](compute_N, loss_N)
        except ValueError as error:
            problems[name] = str(error)
    return Ladder(points, laws, problems)


def notes(ladder: Ladder) -> list[str]:
    """The section of the page: laws, and multipliers over the base."""
    if not ladder.points:
        return []
    rows = [_row(ladder, name) for name in ladder.points]
    head = ("line", "runs", "law", "exponent", "compute multiplier")
    base = next(iter(ladder.points))
    top = min(float(compute_N.max()) for compute_N, _ in ladder.points.values())
    text = (
        f"C in FLOPs; in brackets 95 % intervals. The multiplier is at {top:.3g} "
        f"FLOPs: how much more compute *{markdown.cell(base)}* needs for the same loss."
    )
    why = [f"No law for *{name}*: {text}." for name, text in ladder.problems.items()]
    table = "\n".join(markdown.table(head, rows))
    return ["## Scaling", table, text, *why]


def multipliers(
    laws: Mapping[str, Law], base: str, compute: float
) -> dict[str, scaling_law.Estimate]:
    """Of every line but the base, where the base reaches that line's loss."""
    found = {}
    for name, law in laws.items():
        if name == base or base not in laws:
            continue
        try:
            found[name] = scaling_law.compute_multiplier(laws[base], law, compute)
        except ValueError:
            continue
    return found


def _row(ladder: Ladder, name: str) -> tuple[str, ...]:
    compute_N, _ = ladder.points[name]
    label, count = markdown.cell(name), str(len(compute_N))
    law = ladder.laws.get(name)
    if law is None:
        return label, count, "-", "-", "-"
    base = next(iter(ladder.points))
    top = min(float(c_N.max()) for c_N, _ in ladder.points.values())
    gain = multipliers(ladder.laws, base, top).get(name)
    floor = f"{law.floor:.4g} + " if law.kind == "offset" else ""
    formula = f"{floor}{law.coefficient:.4g} C^-{law.exponent:.4f}"
    shown = "1" if name == base else "-" if gain is None else str(gain)
    return label, count, formula, str(scaling_law.exponent(law)), shown
