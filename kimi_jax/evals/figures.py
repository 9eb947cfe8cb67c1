"""Figures of evaluations; the style is that of `monitor.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from kimi_jax.monitor import plots

_MOST_BARS = 40


def by_length(
    lines: Mapping[str, plots.Series], title: str, train_length: int
) -> Figure:
    """Accuracy over the length of instances, a line a task."""
    figure = plots.new_figure(8.0, 3.8)
    axis = figure.subplots()
    plots.style(axis, title, "accuracy")
    plots.draw_lines(axis, lines, marker="o")
    plots.length_axis(axis, train_length)
    axis.set_ylim(-0.03, 1.03)
    axis.legend(frameon=False, fontsize=9)
    return figure


def heat_map(
    cells: Mapping[tuple[float, int], float],
    title: str,
    label: str,
    rows: Mapping[float, str],
) -> Figure:
    """Heat map of (row, length) -> a share; cells without a number are grey.

    Args:
      label: of the rows.
      rows: the name of each.
    """
    names = sorted(rows)
    lengths = sorted({length for _, length in cells})
    value_RL = np.array(
        [[cells.get((row, length), math.nan) for length in lengths] for row in names]
    )
    figure = plots.new_figure(2.8 + 0.9 * len(lengths), 2.2 + 0.4 * len(names))
    axis = figure.subplots()
    plots.style(axis, title, label)
    axis.grid(visible=False)
    colors = colormaps["RdYlGn"].with_extremes(bad="#f3f4f6")
    image = axis.imshow(value_RL, cmap=colors, vmin=0.0, vmax=1.0, aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(names)), [rows[name] for name in names])
    axis.set_xlabel("length (tokens)", fontsize=9.5)
    for (row, n), value in np.ndenumerate(value_RL):
        if math.isfinite(value):
            axis.text(n, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02)
    return figure


def speed(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Prefill, decoding and cache over length."""
    panels = (
        ("Prefill", "tokens a second", "prefill_tokens_per_second"),
        ("Decoding", "tokens a second", "decode_tokens_per_second"),
        ("Cache", "bytes a sequence", "cache_bytes"),
    )
    figure = plots.new_figure(11.0, 3.2)
    for axis, (title, label, name) in zip(figure.subplots(1, 3), panels, strict=True):
        plots.style(axis, title, label)
        line = plots.Series(
            np.array([r["length"] for r in records]),
            np.array([r[name] for r in records], np.float64),
        )
        plots.draw_lines(axis, {title: line}, marker="o")
        plots.length_axis(axis, None)
        axis.set_ylim(bottom=0.0)
    return figure


def comparison(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars: a group a cell, a colour a run; of very many cells the first ones."""
    specs = list(next(iter(runs.values())))[:_MOST_BARS]
    figure = plots.new_figure(8.5, 1.2 + 0.16 * len(specs) * (len(runs) + 1))
    axis = figure.subplots()
    plots.style(axis, "Accuracy, bits per byte or decoded tokens a second", "")
    height = 0.8 / len(runs)
    for i, (name, values) in enumerate(runs.items()):
        places = [k + i * height for k in range(len(specs))]
        axis.barh(places, [values[s] for s in specs], height, align="edge", label=name)
    axis.set_yticks([k + 0.4 for k in range(len(specs))], specs, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("")
    axis.legend(frameon=False, fontsize=9)
    return figure
