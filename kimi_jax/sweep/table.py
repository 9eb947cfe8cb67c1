"""The runs of a sweep side by side: CSV for programs, Markdown for people.

A group is the runs of one setting that differ in their seeds; its numbers are the mean
and the standard deviation (n - 1) over them.
"""

from __future__ import annotations

import csv
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kimi_jax import flops
from kimi_jax.errors import UserError
from kimi_jax.monitor import markdown, metrics, plots, report, runs
from kimi_jax.sweep.settings import Setting, describe

# Of a run's summary: what the CSV has, in this order.
_FIELDS = (
    "finished",
    "step",
    "tokens",
    "validation_loss",
    "validation_bits_per_byte",
    "best_validation_bits_per_byte",
    "beyond_loss",
    "validation_accuracy",
    "beyond_accuracy",
    "learned_step",
    "train_loss",
    "max_violation_tail",
    "dead_experts",
    "activation_max",
    "tile_decay",
    "residual_rms",
    "head_spread",
    "parameters",
    "seconds",
    "tokens_per_second",
)
# Of those, what the Markdown has: title, field, format of mean and deviation.
_COLUMNS = (
    ("val loss (nats)", "validation_loss", "{:.4f}"),
    ("val bits per byte", "validation_bits_per_byte", "{:.4f}"),
    ("loss beyond the training length", "beyond_loss", "{:.4f}"),
    ("answers right", "validation_accuracy", "{:.3f}"),
    ("beyond", "beyond_accuracy", "{:.3f}"),
    ("99 % at step", "learned_step", "{:.0f}"),
    ("MaxVio, last tenth", "max_violation_tail", "{:.3f}"),
    ("dead experts", "dead_experts", "{:.1f}"),
    ("largest activation", "activation_max", "{:.1f}"),
    ("largest decay of a tile (nats)", "tile_decay", "{:.1f}"),
    ("largest RMS of the running sum", "residual_rms", "{:.2f}"),
    ("busiest head's update over all heads'", "head_spread", "{:.2f}"),
    ("tokens per second", "tokens_per_second", "{:,.0f}"),
)


class Result(NamedTuple):
    """What a run came to."""

    setting: Setting
    summary: dict[str, Any]  # as `report.summarise`
    flops: float  # of training, as far as it went
    validation: plots.Series  # bits per byte over steps
    violation: plots.Series | None  # MaxVio of the worst layer over steps
    residual_rms: np.ndarray | None  # of the running sum, by sublayer, at the end


class Group(NamedTuple):
    """The finished runs of one setting, its seeds apart."""

    swept: dict[str, Any]
    results: list[Result]

    @property
    def label(self) -> str:
        return describe(self.swept)

    def values(self, field: str) -> np.ndarray:
        """The field of every run that has it."""
        found = [result.summary[field] for result in self.results]
        return np.array([x for x in found if x is not None], np.float64)


def read(setting: Setting, folder: pathlib.Path) -> Result | None:
    """The result of the run in `folder`; None if it has not written anything yet."""
    try:
        run = runs.load_run(folder)
    except (FileNotFoundError, UserError):
        return None
    summary = report.summarise(run)
    spent = summary["step"] * flops.step_flops(setting.config)
    loads = runs.layer_series(run, "moe/max_violation")
    depth = runs.layer_series(run, "residual/rms")
    return Result(
        setting,
        summary,
        spent,
        runs.series(run.eval, "bits_per_byte"),
        None if loads is None else plots.Series(loads.steps, loads.values.max(axis=1)),
        None if depth is None else depth.values[-1],
    )


def group(results: Sequence[Result]) -> list[Group]:
    """The finished runs by setting, in the order of the sweep."""
    groups: dict[str, Group] = {}
    for result in results:
        if result.summary["finished"]:
            swept = result.setting.group
            key = json.dumps(swept, sort_keys=True)
            groups.setdefault(key, Group(swept, [])).results.append(result)
    return list(groups.values())


def to_csv(results: Sequence[Result]) -> str:
    """A row for each run, finished or not; a column for each field that is swept."""
    names = list(dict.fromkeys(k for r in results for k in r.setting.swept))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *names, *_FIELDS, "flops"])
    for result in results:
        swept = [_plain(result.setting.swept.get(name, "")) for name in names]
        summary = [_plain(result.summary[name]) for name in _FIELDS]
        writer.writerow([result.setting.id, *swept, *summary, repr(result.flops)])
    return text.getvalue()


def to_markdown(
    title: str,
    groups: Sequence[Group],
    unfinished: Mapping[str, str],
    figures: Sequence[str],
    notes: Sequence[str],
) -> str:
    """The page of a sweep.

    Args:
      unfinished: run and setting -> how it stands.
      figures: names of plots that lie in plots/.
      notes: paragraphs and tables below the main table.
    """
    shown = [c for c in _COLUMNS if any(len(g.values(c[1])) for g in groups)]
    rows = [
        (
            markdown.cell(group.label),
            str(len(group.results)),
            *(spread(group.values(field), form) for _, field, form in shown),
        )
        for group in groups
    ]
    head = ("setting", "seeds", *(title for title, *_ in shown))
    parts = [
        f"# {title}",
        "Mean and standard deviation over the finished runs of a setting.",
        "\n".join(markdown.table(head, rows)),
        *notes,
        *(f"![{name}](plots/{name}.png)" for name in figures),
    ]
    if unfinished:
        lines = [tuple(map(markdown.cell, item)) for item in unfinished.items()]
        table = markdown.table(("run", "state"), lines, "---")
        parts.append("## Not finished\n\n" + "\n".join(table))
    return "\n\n".join(parts) + "\n"


def spread(values: np.ndarray, form: str) -> str:
    """ "2.5031 ± 0.0042"; of one value, the value alone."""
    if not len(values):
        return "-"
    mean = form.format(values.mean())
    return mean if len(values) == 1 else f"{mean} ± {form.format(values.std(ddof=1))}"


def _plain(value: Any) -> Any:
    """As JSON where CSV has no form of its own."""
    value = metrics.to_jsonable(value)
    return json.dumps(value) if isinstance(value, list | dict | bool) else value
