"""Evaluate a model, or compare evaluations.

    python -m experiments.evaluate --config=configs/X.py --checkpoint=runs/X \\
        --tasks=ruler:length=1K/4K,text,speed:length=1K/4K --workdir=DIR
    python -m experiments.evaluate --compare=DIR,OTHER --workdir=COMPARED

Writes results.json, report.md and plots/ into the workdir. The same command goes on
where it stopped; with other --tasks it adds to what is there. docs/evaluations.md lists
the tasks and their dials.
"""

import pathlib

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax.errors import UserError
from kimi_jax.evals import run
from kimi_jax.evals.report import compare

flags.DEFINE_string("checkpoint", None, "workdir or checkpoint; 'fresh': untrained")
flags.DEFINE_string("tasks", None, "what to measure, see docs/evaluations.md")
flags.DEFINE_list("compare", [], "folders of evaluations to put side by side")


def main(overrides: list[str]) -> None:
    given = flags.FLAGS
    needed = (
        ["workdir"] if given.compare else ["config", "checkpoint", "tasks", "workdir"]
    )
    missing = [f"--{name}" for name in needed if getattr(given, name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} missing; see --help for an example")
    console = Console()
    if given.compare:
        _compare(given.compare, pathlib.Path(given.workdir), console)
        return
    results = run.evaluate(
        cli.load_config(overrides),
        given.checkpoint,
        given.tasks,
        given.workdir,
        console,
    )
    console.print(f"results: {results}, report.md and plots beside it", soft_wrap=True)


def _compare(folders: list[str], folder: pathlib.Path, console: Console) -> None:
    if len(set(folders)) < 2:
        raise UserError(f"--compare={','.join(folders)}: name at least two folders")
    runs = {path: run.read_results(path) for path in folders}
    console.print(compare(runs, folder), markup=False, soft_wrap=True)
    console.print(f"table and plot: {folder}/compare.md, compare.png", soft_wrap=True)


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True, optional=True)
