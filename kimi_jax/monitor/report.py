"""Reads a workdir and writes `report.md`, `plots/*.png` and `summary.json` into it.

Every section is optional: a run without experts has no routing section, an interrupted
one has no end.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kimi_jax.monitor import metrics, plots, rl_sections, sections
from kimi_jax.monitor.markdown import code, fence, number, table
from kimi_jax.monitor.report_alerts import alerts_section
from kimi_jax.monitor.runs import Run, last, layer_series, load_run, series, tail

_SAMPLE_LIMIT = 4000
_HEAD_FIELDS = ("kind", "step", "time", "event", "command")


# Title, label of the y axis, name in the records.
_OPTIMIZER_PANELS = (
    ("Learning rate", "peak times schedule", "learning_rate"),
    ("Gradient norm", "global norm before clipping", "gradient_norm"),
)
_ROUTING_PANELS = (
    ("MaxVio", "max load / mean load - 1", "moe/max_violation"),
    ("Load entropy", "entropy / log(experts)", "moe/load_entropy"),
    ("Dead experts", "experts without a token", "moe/dead_experts"),
    ("Bias range", "max bias - min bias", "moe/bias_range"),
)
# Each a figure of its own: their lists are not equally long.
_RESIDUAL_PANELS = {
    "residual_entropy": (
        ("Entropy of the residual weights", "nats", "residual/entropy"),
    ),
    "residual_rms": (("RMS of the running sum", "RMS", "residual/rms"),),
}


def build_report(workdir: str | os.PathLike) -> Path:
    """Write the report of a run and return the path of `report.md`.

    Args:
        workdir: directory with `metrics.jsonl`; `config.json` and `sample.txt` are
            used if they are there.

    Raises:
        FileNotFoundError: there is no metrics file.
        UserError: the metrics file is empty, or a file is damaged.
        OSError: a file cannot be written; the message names it.
    """
    run = load_run(workdir)
    summary = summarise(run)
    (run.workdir / "plots").mkdir(exist_ok=True)
    figures = draw(run)
    for name, figure in figures.items():
        plots.save_figure(figure, run.workdir / "plots" / f"{name}.png")
    text = json.dumps(metrics.to_jsonable(summary), indent=2, allow_nan=False) + "\n"
    metrics.replace_file(run.workdir / "summary.json", text)
    path = run.workdir / "report.md"
    metrics.replace_file(path, render(run, summary, list(figures)))
    return path


def summarise(run: Run) -> dict[str, Any]:
    """The final numbers of a run; None where a run has none.

    `seconds` is wall time over all sessions, compilation and evaluation included. It
    leaves out steps that a crash made the run repeat. `max_violation` is the worst
    layer at the last logged step, `max_violation_tail` the worst layer's mean over
    the last tenth of the log. `residual_rms` is the largest over the depth at the last
    logged step.
    """
    train = last(run.train)
    evaluation = last(run.eval)
    best = min(
        (record for record in run.eval.values() if _finite(record, "bits_per_byte")),
        key=lambda record: record["bits_per_byte"],
        default={},
    )
    violation = layer_series(run, "moe/max_violation")
    dead = layer_series(run, "moe/dead_experts")
    depth = layer_series(run, "residual/rms")
    return {
        "name": (run.config or {}).get("name"),
        "finished": run.finished,
        "step": train.get("step", 0),
        "steps_planned": ((run.config or {}).get("train") or {}).get("steps"),
        "tokens": train.get("tokens"),
        "seconds": run.seconds,
        **sections.summarise_speed(run),
        "train_loss": train.get("loss"),
        "train_bits_per_byte": train.get("bits_per_byte"),
        "first_non_finite_step": min(
            (s for s, r in run.train.items() if "loss" in r and not _finite(r, "loss")),
            default=None,
        ),
        "validation_step": evaluation.get("step"),
        "validation_loss": evaluation.get("loss"),
        "validation_bits_per_byte": evaluation.get("bits_per_byte"),
        **sections.summarise_accuracy(run),
        **sections.summarise_reach(run),
        **rl_sections.summarise_rl(run),
        "best_validation_step": best.get("step"),
        "best_validation_bits_per_byte": best.get("bits_per_byte"),
        "unigram_bits_per_byte": run.info.get("unigram_bits_per_byte"),
        "max_violation": None if violation is None else violation.values[-1].max(),
        "max_violation_tail": None if violation is None else tail(violation).max(),
        "dead_experts": None if dead is None else dead.values[-1].sum(),
        "activation_max": _largest(run, "activation_max"),
        "tile_decay": _largest(run, "tile_decay"),
        "residual_rms": None if depth is None else depth.values[-1].max(),
        "head_spread": sections.head_spread(run),
        "parameters": run.info.get("parameters"),
        "corpus": run.info.get("corpus"),
    }


def _largest(run: Run, name: str) -> float | None:
    """Of all logged steps and layers, whatever part of the model it was measured in."""
    found = (
        float(value)
        for record in run.train.values()
        for key, values in record.get("layers", {}).items()
        if key.endswith(name)
        for value in values
    )
    return max((value for value in found if np.isfinite(value)), default=None)


def draw(run: Run) -> dict[str, Figure]:
    """The figures of a run by name, in the order of the report."""
    figures = {}
    train = series(run.train, "bits_per_byte")
    validation = series(run.eval, "bits_per_byte")
    if np.isfinite(train.values).any() or np.isfinite(validation.values).any():
        unigram = run.info.get("unigram_bits_per_byte")
        figures["loss"] = plots.loss_figure(train, validation, unigram)
    optimizer = [
        plots.Panel(title, label, series(run.train, name))
        for title, label, name in _OPTIMIZER_PANELS
    ]
    optimizer = [p for p in optimizer if np.isfinite(p.series.values).any()]
    if optimizer:
        figures["optimizer"] = plots.history_figure(optimizer)
    figures |= rl_sections.draw_rl(run)
    figures |= sections.draw_accuracy(run)
    figures |= sections.draw_positions(run)
    figures |= sections.draw_speed(run)
    figures |= sections.draw_groups(run)
    routing = _layer_panels(run, _ROUTING_PANELS)
    if routing:
        layers = _moe_layers(run, routing[0].series.values.shape[1])
        figures["routing"] = plots.history_figure(routing, layers, "layer")
    if run.residual_weights is not None:
        figures["residual_map"] = plots.depth_map_figure(
            run.residual_weights, _num_layers(run)
        )
    for name, titles in _RESIDUAL_PANELS.items():
        if panels := _layer_panels(run, titles):
            sublayers = range(panels[0].series.values.shape[1])
            figures[name] = plots.history_figure(panels, sublayers, "sublayer")
    return figures


def render(run: Run, summary: dict[str, Any], figures: Sequence[str]) -> str:
    """The Markdown of the report; `figures` names the plots that exist."""
    parts = [_headline(summary), alerts_section(run.alerts)]
    if "loss" in figures:
        parts.append("## Loss\n\n![Loss curve](plots/loss.png)")
    if "rl_success" in figures:
        parts.append(rl_sections.rl_section(summary, figures))
    if "optimizer" in figures:
        parts.append("## Optimizer\n\n![Optimizer curves](plots/optimizer.png)")
    if "accuracy" in figures:
        parts.append(sections.accuracy_section(run))
    if "positions" in figures:
        parts.append(sections.positions_section(run))
    if "speed" in figures:
        parts.append(sections.speed_section(run))
    if "groups" in figures:
        parts.append(sections.groups_section())
    if "routing" in figures:
        parts.append(_routing_section(run))
    if any(name.startswith("residual_") for name in figures):
        parts.append(_residual_section(figures))
    parts += [_sample_section(run), _reproduce_section(run), _config_section(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(summary: dict[str, Any]) -> str:
    name = summary["name"] or "Training run"
    planned = summary["steps_planned"]
    steps = f"{summary['step']:,}" + (f" of {planned:,}" if planned else "") + " steps"
    state = "finished" if summary["finished"] else "not finished"
    validation, unigram = (
        number(summary["validation_bits_per_byte"]),
        number(summary["unigram_bits_per_byte"]),
    )
    best = number(summary["best_validation_bits_per_byte"])
    if summary["best_validation_step"] is not None:
        best += f" (step {summary['best_validation_step']:,})"
    headline = f"Validation {validation} bits per byte"
    if summary["validation_accuracy"] is not None:
        headline = f"Validation accuracy {number(summary['validation_accuracy'])}"
    if "success_on" in summary:
        headline = f"Success {number(summary['success'])} on {summary['success_on']}"
    rows = [
        *sections.accuracy_rows(summary),
        ("validation bits per byte", validation),
        ("best validation bits per byte", best),
        ("byte-unigram bits per byte of the same text", unigram),
        ("train bits per byte, last step", number(summary["train_bits_per_byte"])),
        ("train loss, last step (nats a token)", number(summary["train_loss"])),
        ("worst MaxVio over layers, last step", number(summary["max_violation"])),
        (
            "worst MaxVio over layers, mean of the last tenth",
            number(summary["max_violation_tail"]),
        ),
        ("dead experts, last step", number(summary["dead_experts"], "{:.0f}")),
        ("tokens", number(summary["tokens"], "{:,}")),
        *sections.speed_rows(summary),
        ("wall time (s), compilation included", f"{summary['seconds']:,.1f}"),
        ("parameters", number(summary["parameters"], "{:,}")),
        ("corpus", number(summary["corpus"], "{}")),
    ]
    beside = f" (byte unigrams: {unigram})" if unigram != "-" else ""
    diverged = summary["first_non_finite_step"]
    warning = (
        [f"The loss was first not finite at step {diverged:,}.", ""]
        if diverged is not None
        else []
    )
    return "\n".join(
        [
            f"# {name}",
            "",
            f"**{headline}**{beside} after {steps}, {state}.",
            "",
            *warning,
            *table(("result", "value"), [row for row in rows if row[1] != "-"]),
        ]
    )


def _routing_section(run: Run) -> str:
    optional = {
        "MaxVio": layer_series(run, "moe/max_violation"),
        "MaxVio, last tenth": layer_series(run, "moe/max_violation"),
        "load entropy": layer_series(run, "moe/load_entropy"),
        "dead experts": layer_series(run, "moe/dead_experts"),
        "bias range": layer_series(run, "moe/bias_range"),
    }
    columns = {name: series for name, series in optional.items() if series is not None}
    values = [
        tail(series) if name.endswith("tenth") else series.values[-1]
        for name, series in columns.items()
    ]
    formats = ["{:g}" if name == "dead experts" else "{:.3f}" for name in columns]
    rows = [
        (str(layer), *(number(x, f) for x, f in zip(row, formats, strict=True)))
        for layer, row in zip(
            _moe_layers(run, len(values[0])), zip(*values, strict=True), strict=True
        )
    ]
    text = (
        "MaxVio is the load of the busiest expert over the mean load, minus one: 0 is "
        "a perfect balance. Values are of the last logged step; the mean over the last "
        "tenth of the log evens out batch noise."
    )
    lines = "\n".join(table(("layer", *columns), rows))
    image = "![Routing by layer](plots/routing.png)"
    return f"## Routing\n\n{image}\n\n{text}\n\n{lines}"


def _residual_section(figures: Sequence[str]) -> str:
    parts = ["## Residual stream"]
    if "residual_map" in figures:
        parts += [
            "![Depth map of the residual weights](plots/residual_map.png)",
            "A column is one sublayer: the weights, averaged over tokens, with which "
            "it mixes the embedding, the finished blocks and the running sum of its "
            "own block.",
        ]
    if "residual_entropy" in figures:
        parts += [
            "![Entropy of the residual weights](plots/residual_entropy.png)",
            "Entropy 0 is one source alone; queries start at zero, which mixes all "
            "sources alike.",
        ]
    if "residual_rms" in figures:
        parts += [
            "![RMS of the running sum](plots/residual_rms.png)",
            "The running sum after each sublayer: of its block alone with attention "
            "residuals, of all layers before it with plain ones.",
        ]
    return "\n\n".join(parts)


def _sample_section(run: Run) -> str:
    path = run.workdir / "sample.txt"
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    cut = f"\n\nThe first {_SAMPLE_LIMIT:,} characters of {len(text):,}."
    note = cut if len(text) > _SAMPLE_LIMIT else ""
    return f"## Sample\n\n{fence(text[:_SAMPLE_LIMIT], 'text')}{note}"


def _reproduce_section(run: Run) -> str:
    parts = ["## How to reproduce"]
    command = run.info.get("command")
    if command:
        parts.append(fence(str(command), "sh"))
    else:
        parts.append("The run recorded no command line; its config is below.")
    if run.resumed_at:
        steps = ", ".join(f"{step:,}" for step in run.resumed_at)
        parts.append(f"Resumed at step {steps}.")
    fields = [
        (name.replace("_", " "), code(value))
        for name, value in run.info.items()
        if name not in _HEAD_FIELDS
    ]
    if fields:
        parts.append("\n".join(table(("recorded", "value"), fields, "---")))
    return "\n\n".join(parts)


def _config_section(run: Run) -> str:
    if not run.config:
        return ""
    rows = [(f"`{name}`", code(value)) for name, value in _flatten(run.config)]
    lines = "\n".join(table(("field", "value"), rows, "---"))
    summary = f"<summary>{len(rows)} fields, as resolved</summary>"
    return f"## Config\n\n<details>\n{summary}\n\n{lines}\n\n</details>"


def _layer_panels(run: Run, table: Sequence[tuple[str, str, str]]) -> list[plots.Panel]:
    panels = []
    for title, label, name in table:
        series = layer_series(run, name)
        if series is not None:
            # Loads are close to even in a healthy run: from zero it is a flat line.
            from_zero = name != "moe/load_entropy"
            panels.append(plots.Panel(title, label, series, from_zero))
    return panels


def _finite(record: dict[str, Any], name: str) -> bool:
    return math.isfinite(record.get(name, math.nan))


def _moe_layers(run: Run, count: int) -> list[int]:
    layers = layer_series(run, "moe/layer_index")
    if layers is None or layers.values.shape[1] != count:
        return list(range(count))
    return [int(layer) for layer in layers.values[-1]]


def _num_layers(run: Run) -> int | None:
    return ((run.config or {}).get("model") or {}).get("num_layers")


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat
