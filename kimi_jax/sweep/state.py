"""How far the runs of a sweep have come, from their folders and a note of failures.

SWEEP/sweep.json      which settings there are, and how runs failed
      ID/             the workdir of a run, as experiments.train leaves it
      logs/ID.log     what it printed
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics, runs
from kimi_jax.sweep.settings import Setting
from kimi_jax.train import workdir

INDEX, LOGS = "sweep.json", "logs"
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

Status = Literal["new", "stopped", "running", "failed", "finished"]


class Progress(NamedTuple):
    """A run, as its folder shows it."""

    status: Status
    step: int = 0
    loss: float | None = None  # of the last log step, nats a token
    validation: float | None = None  # bits per byte, of the last evaluation
    reason: str = ""  # why it failed


class Index:
    """`sweep.json`: one writer, at any time whole."""

    def __init__(self, root: pathlib.Path):
        self._path = root / INDEX
        self._values: dict[str, Any] = {"runs": {}, "failures": {}}
        if self._path.exists():
            try:
                self._values |= json.loads(self._path.read_text())
            except ValueError as error:
                raise UserError(
                    f"{self._path} is damaged: {error}; delete it"
                ) from None

    def add(self, settings: Sequence[Setting]) -> None:
        """Notes which run is which; runs of an earlier form of the sweep stay."""
        self._values["runs"] |= {s.id: s.swept for s in settings}
        self._write()

    def failure(self, run: str) -> str:
        """Why a run failed when it was last tried; empty if it did not."""
        return self._values["failures"].get(run, "")

    def note(self, run: str, failure: str) -> None:
        """Sets the failure of a run, or takes it away."""
        if failure:
            self._values["failures"][run] = failure
        elif not self._values["failures"].pop(run, ""):
            return
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(metrics.to_jsonable(self._values), indent=2)
        metrics.replace_file(self._path, text + "\n")


def look(folder: pathlib.Path, failure: str = "") -> Progress:
    """The progress of the run in `folder`, which nobody has to be working on.

    A run that was stopped and one that was killed look the same: the same command
    resumes both.
    """
    newest = runs.newest_records(folder)
    train, run = newest.get("train", {}), newest.get("run", {})
    steps = [record["step"] for record in newest.values()]
    found = Progress(
        status="stopped" if (folder / workdir.CONFIG).exists() else "new",
        step=max(steps, default=0),
        loss=train.get("loss"),
        validation=newest.get("eval", {}).get("bits_per_byte"),
        reason=failure,
    )
    if run.get("event") == "end":
        return found._replace(status="finished", reason="")
    return found._replace(status="failed") if failure else found


def failure_of(code: int, log: pathlib.Path, start: int = 0) -> str:
    """Why a run ended with the exit code `code`; empty if it finished or was stopped.

    The words are those of the run itself: the last line of its log that begins with
    "error:", or else the last line that is not empty.

    Args:
      start: where this session's part of the log begins, in bytes.
    """
    if code == 0 or code in _STOPPED or -code in (signal.SIGINT, signal.SIGTERM):
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps for its use of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    lines = [line.strip() for line in _tail(log, start).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    words = (errors or lines or ["it printed nothing"])[-1]
    return f"exit code {code}: {words.removeprefix('error:').strip()}"


def _tail(log: pathlib.Path, start: int) -> str:
    with open(log, "rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - (1 << 16)))
        return file.read().decode(errors="replace")
