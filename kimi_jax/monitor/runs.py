"""Reads the records of a workdir into what its report shows.

The metrics file is read once, record by record, and only what is shown is kept, so a
long run of a deep model does not have to fit in memory.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics, plots

# The last tenth of the log: single steps of MaxVio and loss are noisy.
_TAIL_FRACTION = 0.1
_TAIL_BYTES = 1 << 20  # holds the last records of the deepest model


class Run(NamedTuple):
    """What a report needs of a run."""

    workdir: Path
    config: dict[str, Any] | None  # None: there is no config.json
    info: dict[str, Any]  # fields of all "run" records, later ones win
    train: dict[int, dict[str, Any]]  # step -> record
    eval: dict[int, dict[str, Any]]
    checkpoints: dict[int, dict[str, Any]]
    alerts: list[dict[str, Any]]
    residual_weights: np.ndarray | None  # [sublayers, sources], at the last step
    finished: bool
    resumed_at: list[int]
    seconds: float  # wall time of all sessions
    elapsed: float  # since the first record, pauses between sessions included


def load_run(workdir: str | os.PathLike) -> Run:
    """Read a workdir; see `report.build_report` for what it raises."""
    workdir = Path(workdir)
    path = workdir / metrics.FILENAME
    info: dict[str, Any] = {}
    train: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    checkpoints: dict[int, dict[str, Any]] = {}
    alerts: list[dict[str, Any]] = []
    weights, finished, resumed_at, seconds = None, False, [], 0.0
    first = previous = None
    for record in metrics.iter_metrics(path):
        kind, event = record["kind"], record.get("event")
        if kind == "train":
            # Nine numbers for each of up to 187 sublayers, and only the last are drawn.
            weights = record.get("layers", {}).pop("residual/weights", weights)
            train[record["step"]] = record
        elif kind == "eval":
            evaluations[record["step"]] = record
        elif kind == "checkpoint":
            checkpoints[record["step"]] = record
        elif kind == "alert":
            alerts.append(record)
        elif kind == "run":
            info |= record
            finished = event == "end"
            if event == "resume":
                resumed_at.append(record["step"])
        # The time between a session's last record and the next resume is not training.
        if previous is not None and event not in ("start", "resume"):
            seconds += record["time"] - previous
        previous = record["time"]
        first = previous if first is None else first
    if previous is None or first is None:
        raise UserError(f"{path} holds no records yet: wait for the run to start")
    return Run(
        workdir=workdir,
        config=_read_config(workdir / "config.json"),
        info=info,
        train=train,
        eval=evaluations,
        checkpoints=checkpoints,
        alerts=alerts,
        residual_weights=None if weights is None else np.asarray(weights, np.float64),
        finished=finished,
        resumed_at=resumed_at,
        seconds=seconds,
        elapsed=previous - first,
    )


def newest_records(workdir: str | os.PathLike) -> dict[str, metrics.Record]:
    """The last record of each kind, as far as the end of the metrics file shows them.

    Reads a bounded number of bytes, however long the run. Empty if it has not begun.
    """
    try:
        with open(Path(workdir) / metrics.FILENAME, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    newest = {}
    for line in lines:
        try:
            record = metrics.from_jsonable(json.loads(line))
        except ValueError:
            continue  # cut at the start of what was read, or by a kill
        newest[record["kind"]] = record
    return newest


def layer_series(run: Run, name: str) -> plots.Series | None:
    """Per-layer values [P, lines] of the records that have `name`; None if none do."""
    rows = {
        step: record["layers"][name]
        for step, record in run.train.items()
        if record.get("layers", {}).get(name)
    }
    if not rows:
        return None
    return plots.Series(np.array(list(rows)), np.array(list(rows.values()), np.float64))


def series(records: dict[int, dict[str, Any]], name: str) -> plots.Series:
    """One field of the records, NaN where a record lacks it."""
    values = [record.get(name, math.nan) for record in records.values()]
    return plots.Series(np.array(list(records), int), np.array(values, np.float64))


def tail(series: plots.Series) -> np.ndarray:
    """Mean over the last tenth of the log, which evens out single steps."""
    count = max(1, math.ceil(_TAIL_FRACTION * len(series.steps)))
    return series.values[-count:].mean(axis=0)


def last(records: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The record of the last step, or an empty one."""
    return records[max(records)] if records else {}


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}): restore or remove it"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config
