"""The plots of a sweep: final loss by setting, curves, depth, the fit of a ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from kimi_jax.monitor import plots
from kimi_jax.sweep import scaling_law
from kimi_jax.sweep.table import Group

_FIELD = "validation_bits_per_byte"
_MOST_CURVES = 20
# Sweeps over these are shown by their loads, or by depth, as well.
_BALANCING = "model.moe.balancing"
_DEPTH = ("model.num_layers", "model.residual")


def draw(groups: Sequence[Group]) -> dict[str, Figure]:
    """The figures that the finished runs allow."""
    shown = [group for group in groups if len(group.values(_FIELD))]
    if not shown:
        return {}
    few = shown[:_MOST_CURVES]
    drawn = {"final": final(shown), "curves": curves(few)}
    swept = {name for group in shown for name in group.swept}
    if any(name.startswith(_BALANCING) for name in swept):
        loads = {g.label: _mean(s) for g in few if (s := _violations(g))}
        drawn["balance"] = plots.named_figure({"MaxVio of the worst layer": loads})
    deep = {group.label: rms for group in shown if (rms := _by_depth(group))}
    if deep and any(name.startswith(_DEPTH) for name in swept):
        panels = {"RMS of the running sum": deep}
        drawn["depth"] = plots.named_figure(panels, across="sublayer")
    return drawn


def final(groups: Sequence[Group]) -> Figure:
    """Held-out bits per byte of each setting: every run, and their mean."""
    figure, axis = plots.new_axis(
        8.0, 1.3 + 0.32 * len(groups), "Held-out text at the end", ""
    )
    for row, group in enumerate(groups):
        values = group.values(_FIELD)
        axis.plot(values, np.full(len(values), row), "o", color=_color(0), alpha=0.4)
        axis.plot([values.mean()], [row], "|", color=_color(0), markersize=16)
    axis.set_yticks(range(len(groups)), labels=[group.label for group in groups])
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.xaxis.set_major_formatter("{x:.4g}")
    axis.set_xlabel("bits per byte")
    return figure


def curves(groups: Sequence[Group]) -> Figure:
    """Held-out bits per byte over steps, the mean over seeds."""
    return plots.named_figure(
        {"Held-out bits per byte": {g.label: _mean(_validation(g)) for g in groups}},
        from_zero=False,
    )


def ladder(
    points: Mapping[str, tuple[np.ndarray, np.ndarray]],
    laws: Mapping[str, scaling_law.Law],
) -> Figure:
    """Loss against training FLOPs with the fit and its confidence band.

    Args:
      points: FLOPs and losses of the runs, by the name of their line.
      laws: the fits, for some of these names.
    """
    figure, axis = plots.new_axis(
        8.0, 4.6, "Held-out loss against compute", "nats a token"
    )
    for index, (name, (compute_N, loss_N)) in enumerate(points.items()):
        color = _color(index)
        axis.plot(compute_N, loss_N, "o", color=color, label=name)
        if name in laws:
            ends = np.log(compute_N.min() / 1.5), np.log(compute_N.max() * 1.5)
            at = np.exp(np.linspace(*ends, 100))
            low, high = scaling_law.band(laws[name], at)
            axis.plot(at, scaling_law.predict(laws[name], at), color=color)
            axis.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set_xscale("log")
    axis.set_xlabel("training FLOPs")
    axis.legend(frameon=False)
    return figure


def _by_depth(group: Group) -> plots.Series | None:
    """The RMS of the running sum over sublayers, the mean over seeds."""
    rows = [r.residual_rms for r in group.results if r.residual_rms is not None]
    if not rows:
        return None
    return plots.Series(np.arange(len(rows[0])), np.mean(rows, axis=0))


def _validation(group: Group) -> list[plots.Series]:
    return [result.validation for result in group.results]


def _violations(group: Group) -> list[plots.Series]:
    return [r.violation for r in group.results if r.violation is not None]


def _mean(series: Sequence[plots.Series]) -> plots.Series:
    """Over the steps that all of them have."""
    steps = sorted(set.intersection(*({*s.steps.tolist()} for s in series)))
    rows = [s.values[np.isin(s.steps, steps)] for s in series]
    return plots.Series(np.array(steps), np.mean(rows, axis=0))


def _color(index: int) -> tuple[float, ...]:
    colors = colormaps["tab10"]
    return colors(index % colors.N)
