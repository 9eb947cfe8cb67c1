"""The figures of a report: arrays in, matplotlib figures out.

Everything goes through the object API with a style set on each axis: no pyplot, no
rcParams, so drawing inside someone's notebook or test leaves their figures alone.
Long runs are reduced to a mean and a min-max band a bucket, so that a spike of one
step stays visible and a file never holds more points than a screen has pixels.
"""

import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps, ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.figure import Figure

from kimi_jax.monitor.metrics import replace_file

MAX_POINTS = 600

_TRAIN, _VALIDATION, _REFERENCE = "#2f6db3", "#d1495b", "#6b7280"
_TEXT, _AXIS, _GRID = "#1f2937", "#9ca3af", "#e5e7eb"
_UNUSED = "#f3f4f6"
_DPI = 160
_ANNOTATED_CELLS = 220
_LABELLED_LAYERS = 16


class Series(NamedTuple):
    """Values over steps: `steps` [P], `values` [P] or [P, lines]; NaN is a gap."""

    steps: np.ndarray
    values: np.ndarray


class Panel(NamedTuple):
    """One axis of `history_figure`."""

    title: str
    label: str  # of the y axis, with the unit
    series: Series
    from_zero: bool = True  # whether the y axis starts there


class Buckets(NamedTuple):
    """A reduced line: four arrays [buckets]."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def downsample(
    steps: np.ndarray, values: np.ndarray, limit: int = MAX_POINTS
) -> Buckets:
    """Reduce a line to at most `limit` buckets of neighbouring points.

    Args:
        steps: [P].
        values: [P]; non-finite values are dropped.
        limit: most buckets, at least 1.

    Returns:
        Mean step, mean, minimum and maximum of each bucket; the points themselves if
        there are no more than `limit`.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite].astype(np.float64), values[finite]
    if len(values) <= limit:
        return Buckets(steps, values, values, values)
    starts = np.arange(limit) * len(values) // limit
    counts = np.diff(np.append(starts, len(values)))
    return Buckets(
        steps=np.add.reduceat(steps, starts) / counts,
        mean=np.add.reduceat(values, starts) / counts,
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
    )


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average [P] over `width` points, shorter at both ends."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first = np.maximum(index - half, 0)
    last = np.minimum(index + half + 1, len(values))
    return (total[last] - total[first]) / (last - first)


def loss_figure(
    train: Series, validation: Series, unigram_bits_per_byte: float | None
) -> Figure:
    """Bits per byte over steps: train, validation and the byte-unigram line."""
    figure = new_figure(8.0, 4.4)
    axis = figure.subplots()
    style(axis, "Cross-entropy on text", "bits per byte")
    line = downsample(*train)
    if len(line.steps):
        width = 2 * (len(line.steps) // 60) + 1
        label = f"train, last {train.values[np.isfinite(train.values)][-1]:.3f}"
        if width > 1:
            axis.fill_between(
                line.steps, line.low, line.high, color=_TRAIN, alpha=0.18, linewidth=0
            )
            axis.plot(line.steps, line.mean, color=_TRAIN, alpha=0.35, linewidth=0.9)
        mean = smooth(line.mean, width)
        axis.plot(line.steps, mean, color=_TRAIN, linewidth=1.9, label=label)
    finite = np.isfinite(validation.values)
    if finite.any():
        axis.plot(
            validation.steps[finite],
            validation.values[finite],
            color=_VALIDATION,
            linewidth=1.4,
            marker="o",
            markersize=4.5 if finite.sum() <= 60 else 0,
            markeredgecolor="white",
            label=f"validation, last {validation.values[finite][-1]:.3f}",
        )
    if unigram_bits_per_byte is not None:
        axis.axhline(
            unigram_bits_per_byte,
            color=_REFERENCE,
            linewidth=1.3,
            linestyle=(0, (5, 3)),
            label=f"byte-unigram entropy {unigram_bits_per_byte:.3f}",
        )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9.5, labelcolor=_TEXT, loc="upper right")
    return figure


def history_figure(
    panels: Sequence[Panel], line_labels: Sequence[int] = (), legend: str = ""
) -> Figure:
    """Panels over steps, one line each, or one line a layer coloured by depth.

    Args:
        panels: at least one; with `line_labels`, series values are [P, lines].
        line_labels: the depth of each line, ascending, for the shared colour bar.
        legend: title of the colour bar.
    """
    columns = min(len(panels), 3 if len(panels) == 3 and not line_labels else 2)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(3.6 * max(columns, 1.5) + 1.2, 2.75 * rows + 0.25)
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    colors = _depth_colors(max(len(line_labels), 1))
    for axis, panel in zip(axes, panels, strict=False):
        style(axis, panel.title, panel.label)
        steps, values = panel.series
        lines = values.reshape(len(values), -1)
        width = 1.5 if lines.shape[1] <= _LABELLED_LAYERS else 0.8
        for i in range(lines.shape[1]):
            color = colors(i) if line_labels else _TRAIN
            line = downsample(steps, lines[:, i])
            if len(line.steps) == MAX_POINTS and not line_labels:
                axis.fill_between(
                    line.steps, line.low, line.high, color=color, alpha=0.2, linewidth=0
                )
            axis.plot(
                line.steps,
                line.mean,
                color=color,
                linewidth=width,
                marker="o" if len(line.steps) == 1 else None,
            )
        _scale_y(axis, lines, panel.from_zero)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if len(line_labels) > 1:
        _depth_bar(figure, list(axes[: len(panels)]), colors, line_labels, legend)
    return figure


def new_axis(
    width: float, height: float, title: str, label: str
) -> tuple[Figure, Axes]:
    """A figure with one axis in the style of all others; sizes in inches.

    Args:
        label: of the y axis, with the unit.
    """
    figure = new_figure(width, height)
    axis = figure.subplots()
    style(axis, title, label)
    axis.xaxis.set_major_locator(ticker.AutoLocator())
    return figure, axis


def named_figure(
    panels: Mapping[str, Mapping[str, Series]],
    from_zero: bool = True,
    across: str = "step",
) -> Figure:
    """Panels over steps by title, each with lines by name and a legend beside it.

    Args:
        from_zero: whether the y axes start there.
        across: what the x axes count.
    """
    figure = new_figure(8.0, 3.2 * len(panels))
    axes = np.atleast_1d(figure.subplots(len(panels), 1))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        style(axis, title, "")
        draw_lines(axis, lines)
        _scale_y(axis, np.concatenate([x.values for x in lines.values()]), from_zero)
        axis.set_xlabel(across, fontsize=9.5, color=_TEXT)
        axis.legend(
            frameon=False,
            fontsize=8.5,
            labelcolor=_TEXT,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
    return figure


def position_figure(lines: Mapping[str, Series], train_length: int) -> Figure:
    """Loss over the last position of each bin, in nats a token; a line a length."""
    figure = new_figure(8.0, 3.8)
    axis = figure.subplots()
    style(axis, "Loss by position in the document", "nats a token")
    draw_lines(axis, lines, marker="o")
    length_axis(axis, train_length)
    axis.set_xlabel("position (tokens of context)", fontsize=9.5, color=_TEXT)
    axis.legend(frameon=False, fontsize=9.5, labelcolor=_TEXT, title="windows of")
    return figure


def depth_map_figure(weights: np.ndarray, num_layers: int | None) -> Figure:
    """Heat map of attention-residual weights: depth along x, sources along y.

    Args:
        weights: [sublayers, sources], each row a softmax over the sources; the first
            source is the embedding, the last the running sum of the current block.
            Exact zeros are sources that do not exist yet.
        num_layers: depth of the model, to name the columns; None infers it.
    """
    sublayers, sources = weights.shape
    figure = new_figure(
        float(np.clip(0.42 * sublayers + 2.2, 6.4, 10.0)),
        float(np.clip(0.36 * sources + 1.7, 3.2, 8.0)),
    )
    axis = figure.subplots()
    style(axis, "Attention residuals: what each sublayer reads", "source")
    axis.grid(visible=False)
    shown = np.ma.masked_equal(weights.T, 0.0)
    colormap = colormaps["viridis"].with_extremes(bad=_UNUSED)
    # A sublayer with one source has weight 1 whatever it learned: it may saturate.
    choices = weights[np.count_nonzero(weights, axis=1) > 1]
    top = math.ceil(10 * choices.max()) / 10 if choices.size else 1.0
    image = axis.imshow(
        shown, cmap=colormap, vmin=0.0, vmax=top, aspect="auto", origin="lower"
    )
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    _label_sources(axis, sources)
    _label_sublayers(axis, sublayers, num_layers)
    if weights.size <= _ANNOTATED_CELLS:
        for row, column in zip(*np.nonzero(weights), strict=True):
            value = weights[row, column]
            axis.text(
                row,
                column,
                f"{value:.2f}".removeprefix("0"),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if value < 0.6 * top else _TEXT,
            )
    extend = "max" if weights.max() > top else "neither"
    bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, extend=extend)
    _style_bar(bar, "weight (grey: not available)")
    return figure


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Write `figure` as a PNG, atomically and with reproducible bytes."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    # The default metadata holds matplotlib's version, which would change the file.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    replace_file(path, buffer.getvalue())


def sublayer_names(sublayers: int, num_layers: int | None) -> list[str]:
    """Names of the rows of the residual weights: "0 attn", "0 ffn", ..., "output".

    The output mix is there when the number of rows is odd. Rows that do not match
    `num_layers` are numbered instead, rather than named wrongly.
    """
    pairs, has_output = divmod(sublayers, 2)
    if num_layers is not None and num_layers != pairs:
        return [str(i) for i in range(sublayers)]
    names = [f"{layer} {part}" for layer in range(pairs) for part in ("attn", "ffn")]
    return names + ["output"] * has_output


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def style(axis: Axes, title: str, label: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_TEXT)
    axis.set_ylabel(label, fontsize=9.5, color=_TEXT)
    axis.set_xlabel("step", fontsize=9.5, color=_TEXT)
    axis.tick_params(labelsize=8.5, color=_AXIS, labelcolor=_TEXT)
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(_compact))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(_AXIS)


def length_axis(axis: Axes, train_length: int | None) -> None:
    """Tokens along x in powers of two, with a mark at the training length."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("length (tokens)", fontsize=9.5, color=_TEXT)
    if train_length is not None:
        axis.axvline(
            train_length,
            color=_REFERENCE,
            linewidth=1.3,
            linestyle=(0, (5, 3)),
            label="training length",
        )


def draw_lines(
    axis: Axes, lines: Mapping[str, Series], marker: str | None = None
) -> None:
    colors = colormaps["tab20" if len(lines) > 10 else "tab10"]
    for i, (name, (x, values)) in enumerate(lines.items()):
        line = downsample(x, values)
        single = "o" if len(line.steps) == 1 else None
        axis.plot(
            line.steps,
            line.mean,
            color=colors(i % colors.N),
            linewidth=1.4,
            marker=marker or single,
            markersize=4.5,
            label=name,
        )


def _scale_y(axis: Axes, values: np.ndarray, from_zero: bool) -> None:
    """Logarithmic where a linear axis would flatten most of the curve."""
    finite = values[np.isfinite(values)]
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(_compact))
    if len(finite) == 0:
        return
    low, median, high = finite.min(), np.median(finite), finite.max()
    if low > 0 and high > 20 * low and high > 6 * median:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(_compact))
    elif low >= 0 and from_zero:
        axis.set_ylim(bottom=0.0)
        if high == 0:
            axis.set_ylim(top=1.0)


def _compact(value: float, _position: int = 0) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:.6g}"


def _depth_colors(count: int) -> Colormap:
    # The yellow end of viridis is too faint for lines on white.
    return ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.9, count)))


def _depth_bar(
    figure: Figure,
    axes: list[Axes],
    colors: Colormap,
    labels: Sequence[int],
    legend: str,
) -> None:
    count = len(labels)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    stride = math.ceil(count / _LABELLED_LAYERS)
    bar = figure.colorbar(
        ScalarMappable(norm, colors), ax=axes, fraction=0.03, pad=0.02, aspect=30
    )
    bar.set_ticks(range(0, count, stride), labels=[str(x) for x in labels[::stride]])
    bar.minorticks_off()
    _style_bar(bar, legend)


def _style_bar(bar: Colorbar, label: str) -> None:
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=9.5, color=_TEXT)
    bar.ax.tick_params(labelsize=8.5, length=0, labelcolor=_TEXT)


def _label_sources(axis: Axes, sources: int) -> None:
    middle = [f"block {i}" for i in range(1, sources - 1)]
    names = (["embedding"] if sources > 1 else []) + middle + ["running sum"]
    stride = math.ceil(sources / 24)
    kept = sorted({*range(0, sources, stride), sources - 1})
    axis.set_yticks(kept, labels=[names[i] for i in kept])
    axis.tick_params(axis="y", length=0)


def _label_sublayers(axis: Axes, sublayers: int, num_layers: int | None) -> None:
    names = sublayer_names(sublayers, num_layers)
    named = names[0] != "0"
    stride = 1 if sublayers <= 40 else 2 * math.ceil(sublayers / 50)
    kept = list(range(0, sublayers, stride))
    if stride > 1:
        names = [name.split()[0] for name in names]
        axis.set_xlabel("layer" if named else "sublayer", fontsize=9.5, color=_TEXT)
    else:
        axis.set_xlabel("sublayer", fontsize=9.5, color=_TEXT)
    axis.set_xticks(kept, labels=[names[i] for i in kept])
    axis.tick_params(axis="x", length=0, rotation=90 if stride == 1 else 0)
    # White lines between layers keep the attention and FFN of one layer together.
    for edge in range(2, sublayers, 2):
        axis.axvline(edge - 0.5, color="white", linewidth=1.2 if stride == 1 else 0.3)
