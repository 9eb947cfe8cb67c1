"""What every run with a workdir shares: its writer, first state, saves and stops."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import signal
from typing import Any

import jax
import optax

from kimi_jax import accounting, distributed
from kimi_jax.config import Config, Monitor
from kimi_jax.errors import UserError
from kimi_jax.interop.load import check_fits, differences, read_variables
from kimi_jax.interop.sources import Source, open_source
from kimi_jax.monitor.alerts import Alert
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter, Mirror, SilentWriter, Writer
from kimi_jax.monitor.prometheus import Exporter
from kimi_jax.train import checkpoint_files, workdir
from kimi_jax.train.alarm import Alarmed, stop_message
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.program import compile_fast, state_shape
from kimi_jax.train.step import State, init_state, start_state

READ_SECONDS = 600


class Interrupted(UserError):
    """The run was asked to stop and has saved; `exit_code` is the shell's."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def hold_workdir(stack: contextlib.ExitStack, folder: pathlib.Path) -> None:
    """Until the end of `stack`, no other run may work in the claimed folder.

    Raises:
      UserError: one does, in every process.
    """

    def hold() -> None:
        stack.enter_context(workdir.hold(folder))

    distributed.on_leader("lock", hold, timeout=READ_SECONDS)


def open_metrics(
    stack: contextlib.ExitStack,
    folder: pathlib.Path,
    resume_step: int | None,
    monitor: Monitor,
) -> Writer:
    """The leader's writer and those who see what it writes; silence for the others."""
    if not distributed.is_leader():
        return SilentWriter()
    mirrors: list[Mirror] = []
    if monitor.prometheus_port is not None:
        mirrors.append(stack.enter_context(Exporter(monitor.prometheus_port)))
    return stack.enter_context(MetricsWriter(folder, resume_step, mirrors))


def first_state(
    cfg: Config,
    mesh: jax.sharding.Mesh,
    transform: optax.GradientTransformation,
    checkpoints: Checkpointer,
    progress: Progress,
    start: Source | None,
) -> State:
    """The newest checkpoint's state on the mesh, or a fresh one.

    Fresh parameters are random, or those of `start`; the rest begins at zero.
    """
    shapes = state_shape(cfg, mesh, transform)
    step = distributed.on_leader(
        "resume step", checkpoints.latest_step, timeout=READ_SECONDS
    )
    if step is not None:
        progress.note(f"restoring the checkpoint of step {step} ...")
        return checkpoints.restore(shapes, progress.note, step=step)
    where = jax.tree.map(lambda x: x.sharding, shapes)
    if start is not None:
        progress.note(f"reading parameters from {start.where} ...")
        for line in differences(start, cfg.model):
            progress.note(f"unlike those parameters were made for: {line}")
        template = {"params": shapes.params, "balance": shapes.balance}
        read = read_variables(start, cfg.model, template)
        make = functools.partial(start_state, transform)
        return jax.jit(make, donate_argnums=(0, 1), out_shardings=where)(
            read["params"], read["balance"]
        )
    progress.note("initialising parameters ...")
    init = jax.jit(
        lambda: init_state(cfg, transform),
        out_shardings=where,
        compiler_options=compile_fast(mesh),
    )
    return init()


def start_source(cfg: Config, folder: pathlib.Path) -> Source | None:
    """What `train.init_from` names, checked before the long work begins.

    A run that has saved goes on from there, and asks no more for where it began.
    """
    if not cfg.train.init_from or checkpoint_files.steps(folder):
        return None
    source = open_source(cfg.train.init_from)
    check_fits(source, cfg.model)
    return source


def about_run(cfg: Config, first: int, command: str, corpus: str) -> dict[str, Any]:
    """Fields of the "run" record of a run that starts, or resumes at step `first`."""
    parts = accounting.parameter_parts(cfg.model)
    return {
        "event": "resume" if first else "start",
        "command": command,
        "corpus": corpus,
        "parameters": sum(part.total for part in parts),
        "active_parameters": sum(part.active for part in parts),
    }


def end_early(
    step: int,
    stop: signal.Signals | None,
    alerts: list[Alert],
    folder: pathlib.Path,
    checkpoints: Checkpointer,
    metrics: Writer,
    progress: Progress,
) -> None:
    """Ends a run that was asked to, or that an alert stops; `step` is being saved.

    Raises:
      Interrupted, Alarmed: once the save is durable. Without a reason it returns.
    """
    if not stop and not alerts:
        return
    checkpoints.wait()
    report_durable(checkpoints, metrics, progress)
    if stop:
        raise Interrupted(
            f"stopped by {stop.name} after step {step}, which is saved; the same "
            "command resumes it",
            128 + stop,  # the shell's convention
        )
    raise Alarmed(stop_message(alerts, folder))


def report_durable(
    checkpoints: Checkpointer, metrics: Writer, progress: Progress
) -> None:
    """Tell of the saves that became durable since the last call."""
    for saved in checkpoints.take_durable():
        record = {k: v for k, v in saved._asdict().items() if k != "step"}
        metrics.write("checkpoint", saved.step, **record)
        progress.note(
            f"step {saved.step} is durable: {saved.bytes / 1e6:,.1f} MB in "
            f"{saved.seconds:.1f} s, of which {saved.blocking_seconds:.2f} s blocking"
        )
