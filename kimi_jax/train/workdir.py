"""A workdir belongs to one run: who may start in it, and who may resume.

`config.json` is written first and marks the folder. A later start compares it with its
own config and refuses to mix two runs; fields that change how a run is watched, but not
what it computes, may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from kimi_jax import config_io
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.locks import locked
from kimi_jax.monitor.metrics import replace_file

CONFIG = "config.json"
LOCK = ".lock"
TOKENS = "tokens"  # folder of the token stores, made before the workdir is claimed

# Prefixes of fields that do not change the numbers of a run.
_FREE = (
    "name",
    "sample.",
    "evaluation.",
    "mesh.",
    "cluster",
    "train.remat",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_",
    "monitor",
    "train.on_nonfinite",
    "train.max_skips",
    "alerts.",
    "rl.rollout_mesh",
    "rl.eval_tasks",
    "rl.keep_trajectories",
)


def claim(path: str | os.PathLike[str], config: Config) -> bool:
    """Make `path` the workdir of this run. Returns whether a run is there to resume.

    Raises:
      UserError: see `check`.
    """
    resumable = check(path, config)
    if not resumable:
        workdir = pathlib.Path(path)
        workdir.mkdir(parents=True, exist_ok=True)
        values = config_io.to_dict(config)
        replace_file(workdir / CONFIG, json.dumps(values, indent=2) + "\n")
    return resumable


def hold(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Any]:
    """Keeps other processes from working in the claimed `path` at the same time.

    Raises:
      UserError: one does.
    """
    return locked(
        pathlib.Path(path) / LOCK,
        f"--workdir={path}: another process is at work on this run; wait for it, end "
        "it, or name another folder",
    )


def _check_name(workdir: pathlib.Path) -> None:
    """Refuses what the library that writes checkpoints would take for something else.

    It looks for its own files by a pattern that begins with the folder's name, and
    leaves a checkpoint unfinished where that matches nothing.
    """
    if re.match(r"[a-z][a-z0-9]+:/", os.fspath(workdir)):  # a Path has one slash
        raise UserError(
            f"--workdir={workdir}: a workdir is a folder of this machine, or of a disk "
            "that all hosts share; name one without ://"
        )
    odd = sorted(set("*?[]") & set(os.path.abspath(workdir)))
    if odd:
        raise UserError(
            f"--workdir={workdir}: {' '.join(odd)} would be read as a pattern where "
            f"checkpoints are written to {os.path.abspath(workdir)}; name a folder "
            "without"
        )


def check(path: str | os.PathLike[str], config: Config) -> bool:
    """Whether a run of `config` is in `path` to resume. Writes nothing.

    Raises:
      UserError: the folder holds something else, or a run with another config.
    """
    workdir = pathlib.Path(path)
    _check_name(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; name a folder")
    marker = workdir / CONFIG
    if not marker.exists():
        # A run that was killed while claiming leaves only temporary dot-files.
        if workdir.exists() and any(
            not p.name.startswith(".") and p.name != TOKENS for p in workdir.iterdir()
        ):
            mend = "name another folder"
            if (workdir / "checkpoints").is_dir():
                mend += ', or copy "config" out of checkpoints/N/about.json to '
                mend += f"{marker}"
            raise UserError(
                f"--workdir={workdir} is not empty and holds no run, as it has no "
                f"{CONFIG}; {mend}; nothing was written"
            )
        return False
    stored = _read(marker)
    current = json.loads(json.dumps(config_io.to_dict(config)))
    differing = [
        f"  config.{name}: {_show(old)} in the workdir, {_show(new)} now"
        for name, old, new in _differences(stored, current)
        if not name.startswith(_FREE)
    ]
    if differing:
        raise UserError(
            f"--workdir={workdir} holds a run with another config:\n"
            + "\n".join(differing)
            + "\nname another --workdir, or use the same values to resume that run"
        )
    return True


def prolong(path: str | os.PathLike[str], config: Config) -> None:
    """Lets the run in `path` go on to the steps of `config`, if these are more.

    Whether anything else differs is for `check` to say. The rest of a schedule is
    stretched with the run, so its learning rate should be constant by now.
    """
    marker = pathlib.Path(path) / CONFIG
    stored = _read(marker)
    if stored["train"]["steps"] < config.train.steps:
        stored["train"]["steps"] = config.train.steps
        replace_file(marker, json.dumps(stored, indent=2) + "\n")


def load_config(path: str | os.PathLike[str]) -> Config:
    """The config of the run in `path`."""
    marker = pathlib.Path(path) / CONFIG
    if not marker.exists():
        raise UserError(f"--workdir={path} holds no run: {CONFIG} is missing")
    return config_io.from_dict(_tuples(_read(marker)))


def _read(marker: pathlib.Path) -> Any:
    try:
        return config_io.add_later_fields(json.loads(marker.read_text()))
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{marker} is damaged: {error}\nevery checkpoint holds a copy: put the "
            f'"config" of {marker.parent}/checkpoints/STEP/state/about.json there'
        ) from error


_MISSING = object()


def _show(value: Any) -> str:
    return "absent" if value is _MISSING else repr(value)


def _differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            inner = f"{name}.{key}" if name else key
            yield from _differences(a.get(key, _MISSING), b.get(key, _MISSING), inner)
    elif a != b:
        yield name, a, b


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value
