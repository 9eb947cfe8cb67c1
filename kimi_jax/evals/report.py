"""Results as a report of one evaluation, or beside those of others.

Retrieval (finding what was said) and long-horizon tasks (following or counting over the
whole text) are tables of their own; so are recall, state, language and speed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kimi_jax.errors import UserError
from kimi_jax.evals import figures
from kimi_jax.monitor import plots
from kimi_jax.monitor.markdown import number, table
from kimi_jax.monitor.metrics import replace_file, to_jsonable

Record = dict[str, Any]
Results = Mapping[str, Any]

# Family -> title, and (name in the records, head of the column, form).
_TASK_COLUMNS = (
    ("examples", "instances", "{:,}"),
    ("accuracy", "accuracy", "{:.4f}"),
    ("accuracy_error", "±", "{:.4f}"),
    ("completed", "completed", "{:.4f}"),
    ("loss", "nats a label", "{:.4f}"),
    ("digest", "instances' digest", "{}"),
)
_SECTIONS: Mapping[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "recall": ("Recall", _TASK_COLUMNS),
    "state": ("State", _TASK_COLUMNS),
    "retrieval": ("Long context: retrieval", _TASK_COLUMNS),
    "long horizon": ("Long context: long-horizon tasks", _TASK_COLUMNS),
    "episodes": (
        "Episodes: acting in environments",
        (
            ("examples", "tasks", "{:,}"),
            ("success", "success", "{:.4f}"),
            ("success_error", "±", "{:.4f}"),
            ("reward", "reward", "{:.4f}"),
            ("turns", "turns", "{:.1f}"),
            ("tokens", "tokens", "{:,.0f}"),
            ("environment_errors", "errors", "{:.4f}"),
            ("digest", "tasks' digest", "{}"),
        ),
    ),
    "language": (
        "Language",
        (
            ("bits_per_byte", "bits per byte", "{:.4f}"),
            ("loss", "nats a token", "{:.4f}"),
            ("beyond_loss", "nats beyond the training length", "{:.4f}"),
            ("tokens", "tokens", "{:,}"),
            ("beyond_tokens", "tokens beyond", "{:,}"),
            ("source", "text", "{}"),
        ),
    ),
    "speed": (
        "Speed",
        (
            ("prefill_tokens_per_second", "prefill tokens/s", "{:,.0f}"),
            ("decode_tokens_per_second", "decode tokens/s", "{:,.1f}"),
            ("cache_bytes", "cache bytes a sequence", "{:,}"),
        ),
    ),
}
_HEADLINES = {
    "success": "success {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "completed": "completed {:.4f}",
    "bits_per_byte": "{:.4f} bits per byte",
    "prefill_tokens_per_second": "prefill {:,.0f} tokens/s",
    "decode_tokens_per_second": "decode {:,.1f} tokens/s",
    "cache_bytes": "cache {:,} bytes",
}


def headline(record: Record) -> str:
    """The numbers of a record that matter most, as one line."""
    graded = "completed" in record
    return "  ".join(
        form.format(record[name])
        for name, form in _HEADLINES.items()
        if record.get(name) is not None and not (graded and name == "bits_per_byte")
    )


def write_report(folder: pathlib.Path, results: Results) -> pathlib.Path:
    """report.md and plots/*.png of one evaluation."""
    drawn = dict(_figures(results))
    (folder / "plots").mkdir(exist_ok=True)
    for name, figure in drawn.items():
        plots.save_figure(figure, folder / "plots" / f"{name}.png")
    parts = [f"# Evaluation of {results['name']}", _about(results)]
    for family, (title, columns) in _SECTIONS.items():
        records = sorted(
            (r for r in results["results"] if r["family"] == family),
            key=lambda r: (r["task"], r["length"], r["spec"]),
        )
        if not records:
            continue
        parts.append(f"## {title}")
        parts += [
            f"![{n}](plots/{n}.png)" for n in drawn if n.startswith(_file(family))
        ]
        rows = [
            (r["spec"], *(number(r.get(n), form) for n, _, form in columns))
            for r in records
        ]
        heads = ("task", *(head for _, head, _ in columns))
        parts.append("\n".join(table(heads, rows)))
    path = folder / "report.md"
    replace_file(path, "\n\n".join(parts) + "\n")
    return path


def compare(runs: Mapping[str, Results], folder: pathlib.Path) -> str:
    """compare.md, compare.json and compare.png of several evaluations.

    Args:
      runs: results by the name of the run.

    Returns:
      The table, as Markdown. A cell that was measured on other instances than those of
      the first run is marked with *: its numbers do not compare.

    Raises:
      UserError: they have no cell in common.
    """
    by_spec = {
        name: {record["spec"]: record for record in run["results"]}
        for name, run in runs.items()
    }
    first, *others = by_spec.values()
    shared = [spec for spec in first if all(spec in other for other in others)]
    if not shared:
        raise UserError(
            f"{', '.join(runs)} have no cell in common; evaluate them with the same "
            "--tasks"
        )
    measures = [
        (spec, name)
        for spec in shared
        for name in _HEADLINES
        if first[spec].get(name) is not None
    ]
    rows = []
    for spec, measure in measures:
        values = []
        for records in by_spec.values():
            other = records[spec].get("digest") != first[spec].get("digest")
            values.append(number(records[spec].get(measure)) + " *" * other)
        rows.append((spec, measure.replace("_", " "), *values))
    text = "\n".join(table(("task", "measure", *runs), rows))
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "compare.md", f"# Evaluations compared\n\n{text}\n")
    values_json = {
        spec: {name: records[spec] for name, records in by_spec.items()}
        for spec in shared
    }
    replace_file(
        folder / "compare.json", json.dumps(to_jsonable(values_json), indent=2) + "\n"
    )
    figure = figures.comparison(
        {
            name: {spec: _score(records[spec]) for spec in shared}
            for name, records in by_spec.items()
        }
    )
    plots.save_figure(figure, folder / "compare.png")
    return text


def _score(record: Record) -> float:
    """The one number of a record that a comparison draws."""
    names = ("success", "accuracy", "bits_per_byte", "decode_tokens_per_second")
    return next(float(record[n]) for n in names if record.get(n) is not None)


def _about(results: Results) -> str:
    names = (
        "checkpoint",
        "step",
        "weights",
        "train_length",
        "tokenizer",
        "haystack",
    )
    rows = [(name.replace("_", " "), number(results[name], "{:,}")) for name in names]
    return "\n".join(table(("what", "value"), rows))


def _file(family: str) -> str:
    return family.replace(" ", "_")


def _figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Figures by name; a name begins with the family that it is about."""
    records: Sequence[Record] = results["results"]
    for family in ("recall", "state", "retrieval", "long horizon"):
        mine = [r for r in records if r["family"] == family]
        lines = _lines(mine, "accuracy")
        if any(len(line.steps) > 1 for line in lines.values()):
            title = f"{_SECTIONS[family][0]}: accuracy by length"
            train_length = int(results["train_length"])
            yield (
                f"{_file(family)}_length",
                figures.by_length(lines, title, train_length),
            )
    for name, cells in _depths(records).items():
        title = f"{name}: accuracy"
        rows = {depth: f"{depth:.0%}" for depth, _ in cells}
        figure = figures.heat_map(cells, title, "depth of the needle", rows)
        yield f"retrieval_depth_{name}", figure
    for name, cells in _difficulties(records).items():
        rows = {difficulty: f"{difficulty:g}" for difficulty, _ in cells}
        figure = figures.heat_map(cells, f"{name}: success", "difficulty", rows)
        yield f"episodes_{name.replace(':', '_')}", figure
    texts = [r for r in records if r["family"] == "language"]
    for source in dict.fromkeys(r["dials"]["source"] for r in texts):
        mine = [r for r in texts if r["dials"]["source"] == source]
        yield f"language_{source}", _positions(mine, int(results["train_length"]))
    speeds = sorted(
        (r for r in records if r["family"] == "speed"), key=lambda r: r["length"]
    )
    if len(speeds) > 1:
        yield "speed_length", figures.speed(speeds)


def _lines(records: Sequence[Record], measure: str) -> dict[str, plots.Series]:
    """The mean over all cells of a task and length, by task."""
    lines = {}
    for task in dict.fromkeys(r["task"] for r in records):
        mine = [r for r in records if r["task"] == task]
        lengths = sorted({r["length"] for r in mine})
        means = [
            float(np.mean([r[measure] for r in mine if r["length"] == length]))
            for length in lengths
        ]
        lines[task] = plots.Series(np.array(lengths), np.array(means))
    return lines


def _depths(
    records: Sequence[Record],
) -> dict[str, dict[tuple[float, int], float]]:
    """task -> {(depth, length): accuracy} of the needles that lie at a given depth."""
    found: dict[str, dict[tuple[float, int], float]] = {}
    for record in records:
        depth = record["dials"].get("depth", -1)
        if depth >= 0:
            cells = found.setdefault(record["task"], {})
            cells[depth, record["length"]] = record["accuracy"]
    return {task: cells for task, cells in found.items() if len(cells) > 1}


def _difficulties(
    records: Sequence[Record],
) -> dict[str, dict[tuple[float, int], float]]:
    """environment and temperature -> {(difficulty, length): mean success}."""
    found: dict[str, dict[tuple[float, int], list[float]]] = {}
    for record in records:
        if record["family"] == "episodes":
            dials = record["dials"]
            name = record["task"].removeprefix("episodes:")
            cells = found.setdefault(f"{name}_at_{dials['temperature']:g}", {})
            place = dials["difficulty"], record["length"]
            cells.setdefault(place, []).append(record["success"])
    return {
        name: {place: float(np.mean(rates)) for place, rates in cells.items()}
        for name, cells in found.items()
        if len(cells) > 1
    }


def _positions(records: Sequence[Record], train_length: int) -> Figure:
    lines = {
        f"{record['length']:,} tokens": plots.Series(
            np.array([int(x) for x in record["position_loss"]]),
            np.array(list(record["position_loss"].values()), np.float64),
        )
        for record in records
    }
    return plots.position_figure(lines, train_length)
