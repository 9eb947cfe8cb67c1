"""The trajectories of a run as files: WORKDIR/trajectories/iteration_000012.jsonl.

A line is one trajectory with its advantages; the file of an iteration is written at
once, and written again by a resumed run that repeats the iteration.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import replace_file
from kimi_jax.rl.trajectory import Trajectory, from_json

FOLDER = "trajectories"


class Entry(NamedTuple):
    """A trajectory and what was learned from it."""

    trajectory: Trajectory
    # The advantage of each turn; empty for one that was not learned.
    advantages: list[float]


def write(
    workdir: pathlib.Path, iteration: int, entries: Sequence[Entry], keep: int | None
) -> None:
    """Write the trajectories of an iteration, or `keep` of them, evenly spread."""
    chosen: Sequence[Entry] = entries
    if keep is not None and keep < len(entries):
        at = np.linspace(0, len(entries) - 1, keep).round().astype(int)
        chosen = [entries[i] for i in at.tolist()]
    if not chosen:
        return
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    lines = [
        {
            "iteration": iteration,
            "advantages": [float(x) for x in entry.advantages],
            "trajectory": dataclasses.replace(entry.trajectory, routes=None).to_json(),
        }
        for entry in chosen
    ]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    replace_file(_file(workdir, iteration), text)


def iterations(workdir: pathlib.Path) -> list[int]:
    """Those that have a file, ascending."""
    names = [p.stem for p in (workdir / FOLDER).glob("iteration_*.jsonl")]
    return sorted(int(name.removeprefix("iteration_")) for name in names)


def read(workdir: pathlib.Path, iteration: int) -> list[Entry]:
    """The trajectories of an iteration.

    Raises:
      UserError: there is no such file, or it is damaged.
    """
    file = _file(workdir, iteration)
    if not file.is_file():
        found = iterations(workdir)
        have = f"{found[0]} to {found[-1]}" if found else "none"
        raise UserError(
            f"{workdir} has no trajectories of iteration {iteration}; there are {have} "
            "(config.rl.keep_trajectories says how many are kept of each)"
        )
    entries = []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            trajectory = from_json(line["trajectory"])
        except (ValueError, KeyError, TypeError, UserError) as error:
            raise UserError(f"{file}, line {number} is damaged: {error}") from error
        entries.append(Entry(trajectory, line["advantages"]))
    return entries


def _file(workdir: pathlib.Path, iteration: int) -> pathlib.Path:
    return workdir / FOLDER / f"iteration_{iteration:06d}.jsonl"
