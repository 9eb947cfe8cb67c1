"""Sections of the report on speed and time, length of context, and components.

Each has a function that draws and one that writes; both give nothing where the records
hold nothing of the kind.
"""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kimi_jax.monitor import plots
from kimi_jax.monitor.markdown import number, table
from kimi_jax.monitor.runs import Run, last, series, tail

LEARNED = 0.99  # accuracy of a task that counts as learned
_SPREAD = "update_head_spread/"

# Title, label of the y axis, name in the records.
_SPEED_PANELS = (
    ("Throughput", "tokens per second", "tokens_per_second"),
    ("Arithmetic", "model FLOPs per second", "flops_per_second"),
    ("Model FLOP utilisation", "share of the devices' peak", "mfu"),
    ("Productive time", "share of time since the start", "productive_share"),
    ("Waiting for data", "share of step time", "data_wait_share"),
)


def draw_speed(run: Run) -> dict[str, Figure]:
    """Throughput, utilisation and times, over steps."""
    panels = [
        plots.Panel(title, label, series(run.train, name))
        for title, label, name in _SPEED_PANELS
    ]
    pauses = (
        ("Evaluations", series(run.eval, "seconds")),
        ("Checkpoints", series(run.checkpoints, "blocking_seconds")),
    )
    panels += [plots.Panel(name, "seconds without steps", s) for name, s in pauses]
    panels = [p for p in panels if np.isfinite(p.series.values).any()]
    return {"speed": plots.history_figure(panels)} if panels else {}


def draw_groups(run: Run) -> dict[str, Figure]:
    """A line for each component; what has one unit shares a panel."""
    names = {name for record in run.train.values() for name in record.get("groups", {})}
    panels: dict[str, dict[str, plots.Series]] = {}
    for name in sorted(names):
        quantity, _, group = name.rpartition("/")
        # These compare across components; other numbers need not.
        title = quantity if quantity.endswith(("_rms", "_spread")) else name
        values = {s: r.get("groups", {}) for s, r in run.train.items()}
        panels.setdefault(title, {})[group] = series(values, name)
    return {"groups": plots.named_figure(panels)} if panels else {}


def head_spread(run: Run) -> float | None:
    """How unevenly heads are updated, over all attention and the last tenth of the log.

    The largest head over the RMS of all (docs/health.md); None: nothing is recorded.
    """
    rows = [
        [x for name, x in record.get("groups", {}).items() if _SPREAD in name]
        for record in run.train.values()
    ]
    means = np.array([np.mean(row) for row in rows if row])
    steps = np.arange(len(means))
    return float(tail(plots.Series(steps, means))) if len(means) else None


def draw_accuracy(run: Run) -> dict[str, Figure]:
    """The share of right answers over steps, a line for each length of windows."""
    lines = {}
    for length, record in last(run.eval).get("lengths", {}).items():
        if "accuracy" in record:
            values = {s: r["lengths"].get(length, {}) for s, r in run.eval.items()}
            lines[f"{int(length):,} tokens"] = series(values, "accuracy")
    return {"accuracy": plots.named_figure({"Accuracy": lines})} if lines else {}


def draw_positions(run: Run) -> dict[str, Figure]:
    """The last evaluation's loss by position, a line for each length of windows."""
    lengths = last(run.eval).get("lengths", {})
    lines = {}
    for length, record in lengths.items():
        upto, loss = record["position_loss"], record["position_loss"].values()
        lines[f"{int(length):,} tokens"] = plots.Series(
            np.array([int(x) for x in upto]), np.array(list(loss), np.float64)
        )
    train_length = int(next(iter(lengths), 0))
    return {"positions": plots.position_figure(lines, train_length)} if lines else {}


def summarise_speed(run: Run) -> dict[str, Any]:
    """Medians and shares for the summary; None where the records hold none."""
    use = dict(time_use(run))
    waits = _finite(run.train, "data_wait_share")
    rates = {
        name: float(np.median(values)) if len(values) else None
        for name in ("tokens_per_second", "flops_per_second", "mfu")
        for values in [_finite(run.train, name)]
    }
    saves = _finite(run.checkpoints, "blocking_seconds")
    return {
        **rates,
        "productive_share": use["steps"] / run.elapsed if use else None,
        "data_wait_share": float(waits.mean()) if len(waits) else None,
        "checkpoint_seconds": float(saves.mean()) if len(saves) else None,
    }


def summarise_accuracy(run: Run) -> dict[str, Any]:
    """The last accuracy, and the first evaluation with 99 %; None for text."""
    records = sorted(run.eval.items())
    learned = (step for step, r in records if r.get("accuracy", 0.0) >= LEARNED)
    return {
        "validation_accuracy": last(run.eval).get("accuracy"),
        "learned_step": next(learned, None),
    }


def summarise_reach(run: Run) -> dict[str, Any]:
    """At the longest windows of the last evaluation, if they are past the training
    length: the loss of the positions beyond it, and the accuracy of whole windows."""
    lengths = list(last(run.eval).get("lengths", {}).values())
    longest = lengths[-1] if len(lengths) > 1 else {}
    return {
        "beyond_loss": longest.get("beyond_loss"),
        "beyond_accuracy": longest.get("accuracy"),
    }


def accuracy_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of `summarise_accuracy` for the head of the report."""
    if summary["validation_accuracy"] is None:
        return []
    learned = number(summary["learned_step"], "{:,}")
    return [
        ("validation accuracy", number(summary["validation_accuracy"])),
        (f"first step with an accuracy of {LEARNED:.0%}", learned),
    ]


def speed_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of `summarise_speed` for the head of the report."""
    lines = (
        ("tokens per second, median", "tokens_per_second", "{:,.0f}"),
        ("model FLOPs per second, median", "flops_per_second", "{:.3g}"),
        ("model FLOP utilisation, median", "mfu", "{:.1%}"),
        ("productive time, share since the start", "productive_share", "{:.1%}"),
        ("waiting for data, share of step time", "data_wait_share", "{:.2%}"),
        ("checkpoint, mean seconds without steps", "checkpoint_seconds", "{:.2f}"),
    )
    return [(what, number(summary[name], form)) for what, name, form in lines]


def time_use(run: Run) -> list[tuple[str, float]]:
    """(what, seconds) since the run began; empty where the records do not say."""
    steps = last(run.train).get("productive_seconds")
    if steps is None or run.elapsed <= 0:
        return []
    evaluation = float(_finite(run.eval, "seconds").sum())
    saving = float(_finite(run.checkpoints, "blocking_seconds").sum())
    rest = max(0.0, run.seconds - steps - evaluation - saving)
    return [
        ("steps", steps),
        ("evaluation", evaluation),
        ("waiting for checkpoints", saving),
        ("compilation, restoring, sampling", rest),
        ("between sessions, and steps lost with them", run.elapsed - run.seconds),
    ]


def speed_section(run: Run) -> str:
    """Where the time went, as a table."""
    parts = ["## Speed", "![Speed](plots/speed.png)"]
    rows = [
        (what, f"{seconds:,.1f}", f"{seconds / run.elapsed:.1%}")
        for what, seconds in time_use(run)
    ]
    if rows:
        rows.append(("since the start", f"{run.elapsed:,.1f}", "100.0%"))
        parts.append("\n".join(table(("time", "seconds", "share"), rows)))
    parts.append(
        "Model FLOPs count what the model is defined by, forward and backward, and no "
        "recomputation; docs/monitoring.md has the formulas."
    )
    return "\n\n".join(parts)


def groups_section() -> str:
    return "## Components\n\n![By component](plots/groups.png)"


def accuracy_section(run: Run) -> str:
    """The last accuracy by length of windows."""
    record = last(run.eval)
    rows = [
        (f"{int(length):,}", number(values["accuracy"]), f"{values['tokens']:,}")
        for length, values in record["lengths"].items()
    ]
    text = (
        f"Validation at step {record['step']:,}: the share of answer tokens that the "
        "model finds likeliest, true answers before them given."
    )
    image = "![Accuracy](plots/accuracy.png)"
    lines = "\n".join(table(("window", "accuracy", "answer tokens"), rows))
    return f"## Accuracy\n\n{image}\n\n{text}\n\n{lines}"


def positions_section(run: Run) -> str:
    """The last evaluation by length of windows and of context."""
    record = last(run.eval)
    rows = [
        (
            f"{int(length):,}",
            number(values["loss"]),
            number(values["bits_per_byte"]),
            number(values.get("beyond_loss")),
            number(values.get("beyond_bits_per_byte")),
            f"{values['tokens']:,}",
            f"{values.get('beyond_tokens', 0):,}",
        )
        for length, values in record["lengths"].items()
    ]
    head = ("window", "loss", "bits per byte", "loss beyond", "bits per byte beyond")
    lines = table((*head, "tokens", "tokens beyond"), rows)
    text = (
        f"Validation at step {record['step']:,}. A position counts the tokens of its "
        "document that the model has seen; *beyond* are positions past the training "
        "length."
    )
    image = "![Loss by position](plots/positions.png)"
    return f"## Loss by position\n\n{image}\n\n{text}\n\n" + "\n".join(lines)


def _finite(records: dict[int, dict[str, Any]], name: str) -> np.ndarray:
    values = [float(record.get(name, math.nan)) for record in records.values()]
    return np.array([x for x in values if math.isfinite(x)], np.float64)
