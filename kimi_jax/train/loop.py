"""A training run, read from top to bottom.

Tokenise the text, claim the workdir, place the state on the mesh, fresh or restored;
then step, log, evaluate, save; at the end sample and report. Whatever ends a run early
leaves a whole checkpoint behind, and the same command resumes it exactly.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from kimi_jax import accounting, sharding
from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.infer.sample import sample
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter, replace_file
from kimi_jax.monitor.report import build_report
from kimi_jax.monitor.tokenizing import tokenizing_lines
from kimi_jax.train import first_screen, workdir
from kimi_jax.train.alarm import Alarm, Alarmed, stop_message
from kimi_jax.train.batch import batch_shape
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.evaluate import Evaluator
from kimi_jax.train.interrupt import Interrupt
from kimi_jax.train.nonfinite import GuardedStep, go
from kimi_jax.train.step import State, init_state, make_train_step, make_transform
from kimi_jax.train.step_log import StepLog


class Interrupted(UserError):
    """The run was asked to stop and has saved; `exit_code` is the shell's."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class _Run(NamedTuple):
    """What the phases of a run share."""

    cfg: Config
    folder: pathlib.Path
    mesh: jax.sharding.Mesh
    data: loader.Data
    transform: optax.GradientTransformation
    checkpoints: Checkpointer
    metrics: MetricsWriter
    progress: Progress


def train(cfg: Config, path: str, *, console: Console, command: str = "") -> None:
    """Run `cfg` to its last step in the workdir `path`.

    Raises:
      UserError: the workdir, corpus, checkpoint or mesh does not fit, a step is
        not finite, an alert says stop, or the run was interrupted. Finished
        checkpoints stay intact.
    """
    folder = pathlib.Path(path)
    mesh = sharding.make_mesh(cfg)
    workdir.check(folder, cfg)
    data = _load_data(cfg, folder, console)
    resumable = workdir.claim(folder, cfg)
    unigram = float(data.summary["unigram_bits_per_byte"])
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(console, unigram))
        checkpoints = stack.enter_context(
            Checkpointer(folder, cfg.model, cfg.train.checkpoint_keep)
        )
        transform = make_transform(cfg)
        state = _first_state(cfg, mesh, transform, checkpoints, progress)
        first = int(state.step)
        metrics = stack.enter_context(
            MetricsWriter(folder, first if resumable else None)
        )
        first_screen.show(console, cfg, mesh, data, folder, first)
        metrics.write("run", first, **_identity(cfg, data, first, command))
        run = _Run(cfg, folder, mesh, data, transform, checkpoints, metrics, progress)
        with Interrupt() as interrupt:
            state = _steps(run, state, interrupt)
        _write_sample(run, state)
        metrics.write("run", cfg.train.steps, event="end")
    console.print(f"report: {build_report(folder)}")


def _load_data(cfg: Config, folder: pathlib.Path, console: Console) -> loader.Data:
    """Batches from token stores; text is tokenised into the workdir first, once."""
    try:
        return loader.load_data(
            cfg,
            folder / workdir.TOKENS,
            functools.partial(tokenizing_lines, console),
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _identity(
    cfg: Config, data: loader.Data, first: int, command: str
) -> dict[str, Any]:
    parts = accounting.parameter_parts(cfg.model)
    return {
        "event": "resume" if first else "start",
        "command": command,
        "corpus": data.summary["source"],
        "parameters": sum(part.total for part in parts),
        "active_parameters": sum(part.active for part in parts),
        "unigram_bits_per_byte": data.summary["unigram_bits_per_byte"],
    }


def _first_state(
    cfg: Config,
    mesh: jax.sharding.Mesh,
    transform: optax.GradientTransformation,
    checkpoints: Checkpointer,
    progress: Progress,
) -> State:
    """A fresh state on the mesh, or the newest checkpoint's."""
    progress.note("initialising parameters ...")
    init = jax.jit(
        lambda: init_state(cfg, transform),
        out_shardings=sharding.replicated(mesh),
        compiler_options=_compile_fast(mesh),
    )
    step = checkpoints.latest_step()
    if step is None:
        return init()
    progress.note(f"restoring the checkpoint of step {step} ...")
    return checkpoints.restore(init())


def _compile_fast(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Compiler options for a program that runs once.

    On a CPU, LLVM takes a minute to optimise the random draws of a small model.
    """
    platform = mesh.devices.flat[0].platform
    return {"xla_backend_optimization_level": 0} if platform == "cpu" else None


def _steps(run: _Run, state: State, interrupt: Interrupt) -> State:
    """Train to the last step; logs, evaluates and saves on the way."""
    cfg, first, last = run.cfg.train, int(state.step), run.cfg.train.steps
    if first >= last:
        run.progress.note(f"already finished: step {first} of {last}")
        return state
    take_step, evaluate = _compile(run, state)
    log = StepLog(run.cfg, run.data, run.metrics, run.progress)
    alarm = Alarm(run.cfg.alerts, run.metrics, run.progress)
    batches = log.timed(loader.iterate(run.data.train, first, last))
    for step, host in enumerate(batches, first + 1):
        state, metrics = take_step(step, state, host)
        log.add(metrics, host)
        alerts = []
        due = {every: step % every == 0 or step == last for every in _intervals(cfg)}
        if due[cfg.log_every] or interrupt.requested:
            take_step.settle(state)
            alerts = alarm.see(log.write(step, metrics, state))
        if due[cfg.eval_every]:
            record = run.metrics.write("eval", step, **evaluate(state))
            run.progress.update(record, step, last)
        if due[cfg.checkpoint_every] or interrupt.requested or alerts:
            take_step.settle(state)
            run.checkpoints.save(state)
            run.metrics.flush()
        if due[cfg.eval_every] or due[cfg.checkpoint_every]:
            log.restart()
        if interrupt.requested:
            run.checkpoints.wait()
            raise Interrupted(
                f"stopped by {interrupt.requested.name} after step {step}, which is "
                "saved; the same command resumes it",
                interrupt.exit_code,
            )
        if alerts:
            run.checkpoints.wait()
            raise Alarmed(stop_message(alerts, run.folder))
    run.checkpoints.wait()
    return state


def _intervals(cfg: Any) -> set[int]:
    return {cfg.log_every, cfg.eval_every, cfg.checkpoint_every}


def _compile(run: _Run, state: State) -> tuple[GuardedStep, Evaluator]:
    """The train step and the evaluation, compiled before the first step is timed."""
    run.progress.note("compiling the train step ...")
    started = time.monotonic()
    rows = sharding.by_rows(run.mesh)
    step_fn = jax.jit(make_train_step(run.cfg, run.transform), donate_argnums=0)
    shapes = batch_shape(run.cfg.train, rows)
    compiled = step_fn.lower(state, shapes, go(run.mesh)).compile()
    take_step = GuardedStep(
        compiled, run.cfg, run.mesh, run.folder, run.metrics, run.progress
    )
    evaluate = Evaluator(run.cfg, run.data, rows, state)
    run.progress.note(f"compiled in {time.monotonic() - started:.1f} s")
    return take_step, evaluate


def _write_sample(run: _Run, state: State) -> None:
    """`sample.txt`: the prompt and what the trained model makes of it."""
    cfg, tokenizer = run.cfg.sample, run.data.tokenizer
    run.progress.note(f"sampling {cfg.num_tokens} tokens ...")
    prompt = [tokenizer.bos, *tokenizer.encode(cfg.prompt.encode())]
    spoken = np.flatnonzero(tokenizer.bytes_per_token)
    allowed = np.isin(np.arange(run.cfg.model.vocab_size), spoken)
    draw = jax.jit(
        lambda variables: sample(
            run.cfg.model,
            variables,
            jnp.array(prompt, jnp.int32),
            cfg.num_tokens,
            cfg.temperature,
            jax.random.key(run.cfg.train.seed),
            jnp.asarray(allowed),
        )
    )
    tokens = draw({"params": state.params, "balance": state.balance})
    text = tokenizer.decode(np.asarray(tokens))
    replace_file(run.folder / "sample.txt", text + "\n")
