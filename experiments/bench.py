"""Time one part of the project: python -m experiments.bench --config=... --workdir=DIR

The config names the suite. Results are checked before they are timed. Prints a table;
writes results.json, and results.png of what was timed, into the workdir; and curves.png
where a suite follows the time along an axis.
"""

import ast
import json
import pathlib

import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from experiments import (
    bench_generation,
    bench_kda,
    bench_kda_tpu,
    bench_multi_gpu,
    bench_prefill,
    bench_rl,
    cli,
)
from kimi_jax import distributed
from kimi_jax.errors import UserError

SUITES = {
    "kda": bench_kda.run,
    "kda_tpu_static": bench_kda_tpu.run,
    "generation": bench_generation.run,
    "prefill": bench_prefill.run,
    "multi_gpu": bench_multi_gpu.run,
    "rl": bench_rl.run,
}


def main(overrides: list[str]) -> None:
    config = load(overrides)
    folder = pathlib.Path(flags.FLAGS.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    result = SUITES[config.suite](config)
    if not distributed.is_leader():
        return
    (folder / "results.json").write_text(json.dumps(result, indent=2))
    if any(row.get("ms") for row in result["rows"]):
        draw(result["rows"], folder / "results.png")
    if "curves" in result:
        draw_curves(result, folder / "curves.png")
    show(result)


def load(overrides: list[str]) -> ConfigDict:
    """The values of --config with overrides such as `rounds=3` or `peer=False`."""
    config = ConfigDict(cli.load_values())
    for override in overrides:
        name, _, text = override.partition("=")
        *sections, field = name.split(".")
        values = config
        for section in sections:
            values = values.get(section, ConfigDict())
        if field not in values:
            raise UserError(
                f"--config.{name} does not exist; there are "
                f"{', '.join(values or config)}"
            )
        try:
            values[field] = _value(text, values[field])
        except (TypeError, ValueError, SyntaxError) as error:
            raise UserError(f"--config.{override}: not a value of {name}") from error
    if config.get("suite") not in SUITES:
        raise UserError(
            f"suite={config.get('suite')!r} does not exist; choose of {[*SUITES]}"
        )
    return config


def _value(text: str, before: object) -> object:
    """What is written there, a literal of Python; where a string may be, any text."""
    words = {"": "True", "true": "True", "false": "False"}
    try:
        return ast.literal_eval(words.get(text, text))
    except (ValueError, SyntaxError):
        if before is None or isinstance(before, str):
            return text
        raise


def show(result: dict) -> None:
    table = Table(title=f"{result['device']}, {result['versions']}")
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
    for name in columns:
        table.add_column(name)
    for row in result["rows"]:
        table.add_row(*(_text(row.get(name)) for name in columns))
    Console(width=160).print(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Bars of milliseconds, one group a case, on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in rows if row.get("ms")]
    cases = list(dict.fromkeys(row["case"] for row in timed))
    names = list(dict.fromkeys(row["implementation"] for row in timed))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    for i, name in enumerate(names):
        mine = {
            row["case"]: row["ms"] for row in timed if row["implementation"] == name
        }
        places = [cases.index(case) + 0.8 * i / len(names) for case in mine]
        axes.bar(
            places, list(mine.values()), 0.8 / len(names), align="edge", label=name
        )
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)
    axes.set(yscale="log", ylabel="milliseconds")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_curves(result: dict, path: pathlib.Path) -> None:
    """The points of each curve, and medians of 32 of them in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, curve in result["curves"].items():
        x_N, y_N = np.array(curve).T
        (points,) = axes.plot(x_N, y_N, ".", markersize=2, alpha=0.4)
        parts = max(1, len(curve) // 32)
        line = [
            [np.median(part) for part in np.array_split(z_N, parts)]
            for z_N in (x_N, y_N)
        ]
        axes.plot(*line, color=points.get_color(), label=name)
    axes.set(xlabel=result["axes"][0], ylabel=result["axes"][1], ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True)
