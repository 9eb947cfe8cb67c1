"""The page of a curriculum: its stages, its decisions, its loss over all tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from kimi_jax.curriculum import criteria
from kimi_jax.monitor import metrics, plots, runs
from kimi_jax.monitor.markdown import cell, number, table

PAGE = "report.md"


class Leg(NamedTuple):
    """What a stage came to."""

    name: str
    length: int
    steps: int
    tokens: int  # of this stage
    loss: float | None  # held-out nats a token, at its last evaluation
    bits_per_byte: float | None
    gap: float | None  # see `criteria.position_gap`
    seconds: float
    curve: plots.Series  # held-out bits per byte over tokens of the stage


def write(root: pathlib.Path, decisions: Sequence[Mapping[str, Any]]) -> None:
    """Writes `report.md` and its plot from the stages' folders."""
    names = list(dict.fromkeys(d["stage"] for d in decisions))
    legs = [leg for name in names if (leg := _leg(root / name)) is not None]
    if any(len(leg.curve.steps) for leg in legs):
        (root / "plots").mkdir(exist_ok=True)
        plots.save_figure(draw(legs), root / "plots" / "curriculum.png")
    metrics.replace_file(root / PAGE, render(legs, decisions))


def render(legs: Sequence[Leg], decisions: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown."""
    rows = [
        (
            f"[{leg.name}]({leg.name}/{PAGE})",
            f"{leg.length:,}",
            f"{leg.steps:,}",
            f"{leg.tokens:,}",
            number(leg.loss),
            number(leg.bits_per_byte),
            number(leg.gap, "{:+.4f}"),
            f"{leg.seconds:,.0f}",
        )
        for leg in legs
    ]
    head = ("stage", "length", "steps", "tokens", "val loss", "val bits per byte")
    lines = table((*head, "position gap", "seconds"), rows)
    said = [
        (d["stage"], str(d["round"]), d["action"], cell("; ".join(d["reasons"])))
        for d in decisions
    ]
    parts = ["# Curriculum", "\n".join(lines)]
    if any(len(leg.curve.steps) for leg in legs):
        parts.append("![Held-out loss over all tokens](plots/curriculum.png)")
    parts += [
        "The position gap is the held-out loss of the last positions minus that of all "
        "before them, in nats. Each stage is evaluated in windows of its own length.",
        "## Decisions",
        "\n".join(table(("stage", "round", "then", "because"), said, "---")),
    ]
    return "\n\n".join(parts) + "\n"


def draw(legs: Sequence[Leg]) -> Figure:
    """Held-out bits per byte over the tokens of all stages, a line a stage."""
    figure, axis = plots.new_axis(
        8.0, 4.0, "Held-out text, in rows of each stage's length", "bits per byte"
    )
    start = 0
    for leg in legs:
        x = start + leg.curve.steps
        axis.plot(x, leg.curve.values, marker="o", label=f"{leg.length:,}")
        start += leg.tokens
    axis.set_xlabel("tokens")
    axis.legend(frameon=False, title="tokens a row")
    return figure


def _leg(folder: pathlib.Path) -> Leg | None:
    try:
        run = runs.load_run(folder)
    except FileNotFoundError:
        return None
    train = (run.config or {})["train"]
    length, batch = train["seq_len"], train["batch_size"] * train["seq_len"]
    last = runs.last(run.eval)
    windows = last.get("lengths", {}).get(str(length))
    curve = runs.series(run.eval, "bits_per_byte")
    steps = max((*run.train, *run.eval), default=0)
    return Leg(
        folder.name,
        length,
        steps,
        steps * batch,
        last.get("loss"),
        last.get("bits_per_byte"),
        None if windows is None else _finite(criteria.position_gap(windows, length)),
        run.seconds,
        curve._replace(steps=curve.steps * batch),
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
