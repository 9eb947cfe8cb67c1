"""A training run, read from top to bottom.

Claim the workdir, read the text, place the state on the mesh, fresh or restored; then
step, log, evaluate, save; at the end sample and report. Whatever ends a run early
leaves a whole checkpoint behind, and the same command resumes it exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from kimi_jax import accounting, sharding
from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.infer.sample import sample
from kimi_jax.modules import transformer
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter, replace_file
from kimi_jax.monitor.report import build_report
from kimi_jax.train import first_screen, health, optimizer, workdir
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.interrupt import Interrupt
from kimi_jax.train.step import (
    Batch,
    State,
    init_state,
    make_eval_step,
    make_train_step,
)


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
    checkpoints: Checkpointer
    metrics: MetricsWriter
    progress: Progress


def train(cfg: Config, path: str, *, console: Console, command: str = "") -> None:
    """Run `cfg` to its last step in the workdir `path`.

    Raises:
      UserError: the workdir, corpus, checkpoint or mesh does not fit, the loss is not
        finite, or the run was interrupted. Finished checkpoints stay intact.
    """
    folder = pathlib.Path(path)
    mesh = sharding.make_mesh(cfg)
    data = _load_data(cfg)
    resumable = workdir.claim(folder, cfg)
    unigram = float(data.summary["unigram_bits_per_byte"])
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(console, unigram))
        checkpoints = stack.enter_context(
            Checkpointer(folder, cfg, _data_identity(data))
        )
        state = _first_state(cfg, mesh, checkpoints, progress)
        first = int(state.step)
        metrics = stack.enter_context(
            MetricsWriter(folder, first if resumable else None)
        )
        first_screen.show(console, cfg, mesh, data.summary, folder, first)
        metrics.write("run", first, **_identity(cfg, data, first, command))
        run = _Run(cfg, folder, mesh, data, checkpoints, metrics, progress)
        with Interrupt() as interrupt:
            state = _steps(run, state, interrupt)
        _write_sample(run, state)
        metrics.write("run", cfg.train.steps, event="end")
    console.print(f"report: {build_report(folder)}")


def _load_data(cfg: Config) -> loader.Data:
    try:
        data = loader.load_data(
            cfg.data.path,
            validation_fraction=cfg.data.validation_fraction,
            seed=cfg.data.seed,
            batch_size=cfg.train.batch_size,
            length=cfg.train.seq_len,
            steps=cfg.train.steps,
            eval_batches=cfg.train.eval_batches,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if data.tokenizer.vocab_size > cfg.model.vocab_size:
        raise UserError(
            f"config.model.vocab_size={cfg.model.vocab_size}: the tokenizer has "
            f"{data.tokenizer.vocab_size} tokens; use at least that many"
        )
    return data


def _data_identity(data: loader.Data) -> dict[str, str]:
    """What must be the same when the run goes on."""
    return {
        "training tokens": hashlib.sha256(data.train.stream_N).hexdigest(),
        "validation tokens": hashlib.sha256(data.validation.stream_N).hexdigest(),
        "tokenizer": f"bytes, {data.tokenizer.vocab_size} tokens",
    }


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


def _transform(cfg: Config) -> Any:
    fresh = jax.eval_shape(lambda: transformer.init(cfg.model, jax.random.key(0)))
    return optimizer.make(cfg.optimizer, cfg.train.steps, fresh["params"])


def _first_state(
    cfg: Config, mesh: jax.sharding.Mesh, checkpoints: Checkpointer, progress: Progress
) -> State:
    """A fresh state on the mesh, or the newest checkpoint's."""
    transform = _transform(cfg)
    where = sharding.replicated(mesh)
    step = checkpoints.latest_step()
    if step is not None:
        progress.note(f"restoring the checkpoint of step {step} ...")
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            jax.eval_shape(lambda: init_state(cfg, transform)),
        )
        return checkpoints.restore(template, progress.note)
    progress.note("initialising parameters ...")
    init = jax.jit(
        lambda: init_state(cfg, transform),
        out_shardings=where,
        compiler_options=_compile_fast(mesh),
    )
    return init()


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
    rows = sharding.by_rows(run.mesh)
    evaluate = _evaluator(run)
    step_fn, log, previous = None, _Log(run, first), None
    for step, host in enumerate(loader.iterate(run.data.train, first, last), first + 1):
        batch = _on_mesh(host, rows)
        if step_fn is None:
            step_fn = _compile(run, state, batch)
            log.restart()
        state, metrics = step_fn(state, batch)
        # Looking at the step before lets the device work ahead of the host.
        _check_finite(run, previous, step - 1)
        log.add(metrics, host)
        previous = metrics
        _report_durable(run)
        due = {every: step % every == 0 or step == last for every in _intervals(cfg)}
        if due[cfg.log_every] or interrupt.requested:
            _check_finite(run, metrics, step)
            log.write(step, metrics, state)
        if due[cfg.eval_every]:
            evaluate(step, state)
        if due[cfg.checkpoint_every] or interrupt.requested:
            _check_finite(run, metrics, step)
            # First the records: a durable step never lacks those that lead to it.
            run.metrics.flush()
            run.checkpoints.save(state)
        if due[cfg.eval_every] or due[cfg.checkpoint_every]:
            log.restart()
        if interrupt.requested:
            run.checkpoints.wait()
            _report_durable(run)
            raise Interrupted(
                f"stopped by {interrupt.requested.name} after step {step}, which is "
                "saved; the same command resumes it",
                interrupt.exit_code,
            )
    run.checkpoints.wait()
    _report_durable(run)
    return state


def _report_durable(run: _Run) -> None:
    for saved in run.checkpoints.take_durable():
        record = {k: v for k, v in saved._asdict().items() if k != "step"}
        run.metrics.write("checkpoint", saved.step, **record)
        run.progress.note(
            f"step {saved.step} is durable: {saved.bytes / 1e6:,.1f} MB in "
            f"{saved.seconds:.1f} s, of which {saved.blocking_seconds:.2f} s blocking"
        )


def _intervals(cfg: Any) -> set[int]:
    return {cfg.log_every, cfg.eval_every, cfg.checkpoint_every}


def _compile(run: _Run, state: State, batch: Batch) -> Callable[..., Any]:
    run.progress.note("compiling the train step ...")
    started = time.monotonic()
    step_fn = jax.jit(make_train_step(run.cfg, _transform(run.cfg)), donate_argnums=0)
    compiled = step_fn.lower(state, batch).compile()
    run.progress.note(f"compiled in {time.monotonic() - started:.1f} s")
    return compiled


def _on_mesh(host: loader.Batch, rows: jax.sharding.NamedSharding) -> Batch:
    names = ("tokens", "targets", "segment_ids", "weights")
    return Batch(*(jax.device_put(host[name], rows) for name in names))


def _check_finite(run: _Run, metrics: Any, step: int) -> None:
    if metrics is not None and not bool(metrics["finite"]):
        saved = run.checkpoints.latest_step()
        raise UserError(
            f"the loss or gradient of step {step} is not finite "
            f"(loss {float(metrics['loss'])}, gradient norm "
            f"{float(metrics['gradient_norm'])}); the step was not applied. "
            f"The last checkpoint is step {saved}. Lower "
            "--config.optimizer.learning_rate or --config.optimizer.clip_norm and "
            "start in a new --workdir"
        )


class _Log:
    """Averages the steps since the last line; one "train" record a line."""

    def __init__(self, run: _Run, first: int):
        self._run = run
        self._bytes_W = run.data.tokenizer.bytes_per_token
        self._schedule = optimizer.schedule(run.cfg.optimizer, run.cfg.train.steps)
        self._rows: list[tuple[Any, float]] = []
        self._seconds, self._steps, self._started = 0.0, first, time.monotonic()

    def restart(self) -> None:
        """Start the clock again: what happened since the last line was no step."""
        self._started = time.monotonic()

    def add(self, metrics: Any, host: loader.Batch) -> None:
        num_bytes = float((self._bytes_W[host["targets"]] * host["weights"]).sum())
        self._rows.append(((metrics["loss"], metrics["predicted"]), num_bytes))

    def write(self, step: int, metrics: Any, state: State) -> None:
        cfg = self._run.cfg
        rows = [(float(loss) * float(n), float(n), b) for (loss, n), b in self._rows]
        nats, tokens, num_bytes = np.sum(rows, axis=0)
        seconds = (time.monotonic() - self._started) / len(rows)
        record = self._run.metrics.write(
            "train",
            step,
            loss=nats / tokens,
            bits_per_byte=nats / math.log(2) / num_bytes,
            learning_rate=float(self._schedule(step - 1)),
            gradient_norm=metrics["gradient_norm"],
            tokens=step * cfg.train.batch_size * cfg.train.seq_len,
            tokens_per_second=cfg.train.batch_size * cfg.train.seq_len / seconds,
            step_seconds=seconds,
            layers=health.layer_metrics(cfg.model, metrics["stats"], state.balance),
        )
        self._run.progress.update(record, step, cfg.train.steps)
        self._rows.clear()
        self.restart()


def _evaluator(run: _Run) -> Callable[[int, State], None]:
    """(step, state) -> writes the "eval" record of the validation text."""
    eval_fn = jax.jit(make_eval_step(run.cfg))
    bytes_W = run.data.tokenizer.bytes_per_token
    rows = sharding.by_rows(run.mesh)

    def evaluate(step: int, state: State) -> None:
        nats = tokens = num_bytes = 0.0
        for host in loader.iterate(run.data.validation, 0, len(run.data.validation)):
            sums = eval_fn(state, _on_mesh(host, rows))
            nats += float(sums["nats"])
            tokens += float(sums["tokens"])
            num_bytes += float((bytes_W[host["targets"]] * host["weights"]).sum())
        record = run.metrics.write(
            "eval",
            step,
            loss=nats / tokens,
            bits_per_byte=nats / math.log(2) / num_bytes,
            tokens=int(tokens),
        )
        run.progress.update(record, step, run.cfg.train.steps)

    return evaluate


def _write_sample(run: _Run, state: State) -> None:
    """`sample.txt`: the prompt and what the trained model makes of it."""
    cfg, tokenizer = run.cfg.sample, run.data.tokenizer
    run.progress.note(f"sampling {cfg.num_tokens} tokens ...")
    prompt = [tokenizer.bos, *tokenizer.encode(cfg.prompt.encode())]
    vocabulary = np.arange(run.cfg.model.vocab_size)
    draw = jax.jit(
        lambda variables: sample(
            run.cfg.model,
            variables,
            jnp.array(prompt, jnp.int32),
            cfg.num_tokens,
            cfg.temperature,
            jax.random.key(run.cfg.train.seed),
            jnp.asarray(vocabulary < 256),
        )
    )
    tokens = draw({"params": state.params, "balance": state.balance})
    text = tokenizer.decode(np.asarray(tokens))
    replace_file(run.folder / "sample.txt", text + "\n")
