"""A sweep as a shell script: one command a run, for this machine or for a launcher."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from kimi_jax.errors import UserError

SHELL = "shell"
# Files beside the launchers of jobs: what they share, and processes of this machine.
_NOT_OF_JOBS = {"common", "local"}
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"


class Task(NamedTuple):
    """A run for a launcher."""

    name: str  # of the job
    title: str  # for people
    arguments: Sequence[str]  # of experiments.train


def script(
    kind: str, tasks: Sequence[Task], options: Sequence[str], launchers: pathlib.Path
) -> str:
    """A script that does the tasks, or submits them.

    Args:
      kind: "shell", or a launcher, by the name of its file without the suffix.
      options: of the launcher; the name of the job is added.
      launchers: the folder of the launchers.

    Raises:
      UserError: there is no such launcher, or it does not take these options.
    """
    known = sorted({p.stem for p in launchers.glob("*.sh")} - _NOT_OF_JOBS)
    if kind != SHELL and kind not in known:
        raise UserError(f"--emit={kind}: choose one of {', '.join([SHELL, *known])}")
    if kind == SHELL and options:
        raise UserError(
            f"--launch={shlex.join(options)}: --emit=shell takes no options"
        )
    commands = [_command(kind, task, options, launchers) for task in tasks]
    if kind != SHELL and commands:
        _try(kind, commands[0])
    lines = [
        f"# {task.title}\n{shlex.join(command)}\n"
        for task, command in zip(tasks, commands, strict=True)
    ]
    return "\n".join([_HEAD, *lines])


def job_name(*parts: str) -> str:
    """A name that every launcher takes: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _command(
    kind: str, task: Task, options: Sequence[str], launchers: pathlib.Path
) -> list[str]:
    if kind == SHELL:
        return ["python", "-m", "experiments.train", *task.arguments]
    launcher = str(launchers / f"{kind}.sh")
    return [launcher, f"--name={task.name}", *options, "--", *task.arguments]


def _try(kind: str, command: Sequence[str]) -> None:
    """A dry run, so that a missing option is named here and not by the first job."""
    launcher, *rest = command
    tried = subprocess.run(
        ["bash", launcher, "--dry-run", *rest],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if tried.returncode:
        words = (tried.stderr.strip().splitlines() or ["it failed"])[-1]
        raise UserError(
            f"--emit={kind}: {words.removeprefix('error: ')}\npass the options of "
            f"{launcher} as --launch='--NAME=VALUE ...'"
        )
