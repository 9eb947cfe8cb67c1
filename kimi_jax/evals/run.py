"""An evaluation from start to report: one file a cell, resumed where it stopped.

DIR/evaluation.json    whose numbers these are; another model is refused
DIR/cells/*.json       a result each, written when it is there
DIR/results.json       all of them, DIR/report.md and DIR/plots/
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from kimi_jax import config_io, sharding
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.evals.cells import Cell, make_text, plan
from kimi_jax.evals.measure import Measure, Record
from kimi_jax.evals.report import headline, write_report
from kimi_jax.interop.load import load_variables
from kimi_jax.modules import transformer
from kimi_jax.monitor.console import format_seconds
from kimi_jax.monitor.metrics import replace_file, to_jsonable
from kimi_jax.train import checkpoint_files
from kimi_jax.train.program import compile_fast

IDENTITY, CELLS, RESULTS = "evaluation.json", "cells", "results.json"
FRESH = "fresh"
_LINE_SECONDS = 10.0


def evaluate(
    cfg: Config, checkpoint: str, tasks: str, path: str, console: Console
) -> pathlib.Path:
    """Measure all cells that have no result yet; returns the path of results.json.

    Args:
      checkpoint: a workdir or one of its checkpoints; "fresh": first parameters.
      tasks: specs with commas between them, see `cells`.
      path: the folder of the results.

    Raises:
      UserError: a task that cannot run, no checkpoint, or a folder with the results
        of something else; nothing is written then.
    """
    folder = pathlib.Path(path)
    text = make_text(cfg)
    cells = plan(cfg, tasks, text)
    mesh = sharding.make_mesh(cfg)
    about = _identity(cfg, checkpoint, text.haystack.digest)
    variables = functools.cache(lambda: _variables(cfg, checkpoint, mesh))
    if not (folder / IDENTITY).exists():
        variables()  # what does not fit this model claims no folder
    _claim(folder, about)
    waiting = [cell for cell in cells if not (folder / CELLS / cell.file).exists()]
    say = _Say(console)
    say(
        f"{len(cells)} cells, {len(cells) - len(waiting)} of them finished before; "
        f"results: {folder}"
    )
    if waiting:
        measure = Measure(cfg, variables(), mesh, folder / "tokens")
        _measure_all(waiting, measure, folder, say)
    records = [read_json(folder / CELLS / cell.file) for cell in cells]
    found = folder / RESULTS
    replace_file(found, _dump({**about, "results": _all(folder, records)}))
    write_report(folder, read_json(found))
    return found


def read_results(path: str | pathlib.Path) -> dict[str, Any]:
    """The results.json of a folder.

    Raises:
      UserError: there is none, or it is damaged.
    """
    file = pathlib.Path(path) / RESULTS
    if not file.is_file():
        raise UserError(
            f"{path} holds no {RESULTS}; name the --workdir of experiments.evaluate"
        )
    return read_json(file)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(
            f"{file} is damaged ({error}); remove it and run the same command again"
        ) from error


class _Say:
    """Lines with the time since the start."""

    def __init__(self, console: Console):
        self._console, self._start = console, time.monotonic()

    def __call__(self, line: str) -> None:
        elapsed = time.monotonic() - self._start
        self._console.print(
            f"[{elapsed:7.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )


def _measure_all(
    cells: Sequence[Cell], measure: Measure, folder: pathlib.Path, say: _Say
) -> None:
    """Cells by length, short ones first, each stored as soon as it is measured."""
    order = sorted(cells, key=lambda cell: cell.length)
    work = [cell.rows * cell.length for cell in order]
    (folder / CELLS).mkdir(exist_ok=True)
    started = time.monotonic()
    for i, cell in enumerate(order):
        at = f"{i + 1}/{len(order)}"
        last = time.monotonic()

        def done(count: int, cell: Cell = cell, at: str = at) -> None:
            nonlocal last
            if count < cell.rows and time.monotonic() - last > _LINE_SECONDS:
                last = time.monotonic()
                say(f"{at}  {cell.name}  {count} of {cell.rows} rows")

        record = measure(cell, done)
        replace_file(folder / CELLS / cell.file, _dump(record))
        spent, share = time.monotonic() - started, sum(work[: i + 1]) / sum(work)
        say(
            f"{at}  {cell.name}  {headline(record)}  {record['seconds']:.1f} s  "
            f"ETA {format_seconds(spent / share - spent)}"
        )


def _identity(cfg: Config, checkpoint: str, haystack: str) -> dict[str, Any]:
    """What results depend on, the cells apart."""
    model = json.dumps(config_io.to_dict(cfg)["model"], sort_keys=True)
    about: dict[str, Any] = {"checkpoint": checkpoint, "step": 0, "weights": FRESH}
    if checkpoint != FRESH:
        found = checkpoint_files.find(checkpoint)
        # The sums of all files: other weights have others.
        sums = found / checkpoint_files.STATE / checkpoint_files.FILES
        about |= {"checkpoint": str(found), "step": int(found.name)}
        about["weights"] = hashlib.sha256(sums.read_bytes()).hexdigest()[:16]
    return about | {
        "name": cfg.name,
        "model": hashlib.sha256(model.encode()).hexdigest()[:16],
        "train_length": cfg.train.seq_len,
        "tokenizer": cfg.data.tokenizer,
        "haystack": haystack,
        "examples": cfg.evaluation.examples,
        "seed": cfg.evaluation.seed,
    }


def _claim(folder: pathlib.Path, about: dict[str, Any]) -> None:
    marker = folder / IDENTITY
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--workdir={folder} is a file; name a folder")
    if not marker.exists():
        if folder.exists() and any(
            not p.name.startswith(".") for p in folder.iterdir()
        ):
            raise UserError(
                f"--workdir={folder} is not empty and holds no evaluation; name "
                "another folder, nothing was written"
            )
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(marker, _dump(about))
        return
    stored = read_json(marker)
    differing = [
        f"  {name}: {stored.get(name)!r} in the folder, {value!r} now"
        for name, value in about.items()
        if stored.get(name) != value
    ]
    if differing:
        raise UserError(
            f"--workdir={folder} holds the results of something else:\n"
            + "\n".join(differing)
            + "\nname another --workdir, one for each model"
        )


def _variables(cfg: Config, checkpoint: str, mesh: jax.sharding.Mesh) -> Any:
    """{"params", "balance"} on the mesh."""
    if checkpoint != FRESH:
        return load_variables(checkpoint, cfg.model, mesh)

    def init() -> transformer.Variables:
        made = transformer.init(cfg.model, jax.random.key(cfg.train.seed))
        return {"params": made["params"], "balance": made.get("balance", {})}

    where = sharding.state_shardings(mesh, jax.eval_shape(init))
    return jax.jit(init, out_shardings=where, compiler_options=compile_fast(mesh))()


def _all(folder: pathlib.Path, records: Sequence[Record]) -> list[Record]:
    """The records of this call, then those of earlier calls that it did not name."""
    named = {record["spec"] for record in records}
    others = [read_json(file) for file in sorted((folder / CELLS).glob("*.json"))]
    return [*records, *(r for r in others if r["spec"] not in named)]


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(to_jsonable(value), indent=2, allow_nan=False) + "\n"
