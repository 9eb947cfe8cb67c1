"""A training run, read from top to bottom.

Tokenise the text, claim the workdir, place the state on the mesh, fresh or restored;
then step, log, evaluate, save; at the end sample and report. Whatever ends a run early
leaves a whole checkpoint behind, and the same command resumes it exactly.

Several processes run it side by side, each with its own devices and rows. Whatever
touches an array runs in all of them; the leader alone writes and talks, the others have
a silent console and a silent writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console
from rich.text import Text

from kimi_jax import distributed, sharding
from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.requests import Ask, Request
from kimi_jax.infer.sampling import Sampling
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import Writer, replace_file
from kimi_jax.monitor.report import build_report
from kimi_jax.monitor.tokenizing import tokenizing_lines
from kimi_jax.train import first_screen, workdir
from kimi_jax.train.alarm import Alarm
from kimi_jax.train.batch import Share, share_of_rows
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.evaluate import Evaluator, check_lengths
from kimi_jax.train.interrupt import Interrupt
from kimi_jax.train.nonfinite import GuardedStep, text_feed
from kimi_jax.train.profile import Profiler
from kimi_jax.train.program import PRE_TRAINING, lower_step
from kimi_jax.train.session import (
    READ_SECONDS,
    about_run,
    end_early,
    first_state,
    hold_workdir,
    open_metrics,
    report_durable,
    start_source,
)
from kimi_jax.train.step import State, make_transform
from kimi_jax.train.step_log import StepLog

_TOKENIZE_SECONDS = 7 * 24 * 3600  # a corpus takes as long as it takes


class _Run(NamedTuple):
    """What the phases of a run share."""

    cfg: Config
    folder: pathlib.Path
    mesh: jax.sharding.Mesh
    data: loader.Data
    share: Share  # of the rows of each batch, that this process reads
    transform: optax.GradientTransformation
    checkpoints: Checkpointer
    metrics: Writer
    progress: Progress
    profiler: Profiler


def train(cfg: Config, path: str, *, console: Console, command: str = "") -> None:
    """Run `cfg` to its last step in the workdir `path`.

    Raises:
      UserError: the workdir, corpus, checkpoint or mesh does not fit, a step is
        not finite, an alert says stop, or the run was interrupted. Finished
        checkpoints stay intact.
    """
    if cfg.rl is not None:
        raise UserError(
            "config.rl is there: python -m experiments.rl runs this config; for "
            "supervised training use --config.rl=none"
        )
    folder = pathlib.Path(path)
    monitor = cfg.monitor
    if not distributed.is_leader():
        console = Console(quiet=True, force_terminal=False)
        monitor = dataclasses.replace(monitor, profile="", prometheus_port=None)
    mesh = sharding.make_mesh(cfg)
    first_screen.kda_kernel(cfg, mesh)  # said before anything is written
    share = distributed.on_all(
        "dealing out rows",
        lambda: share_of_rows(sharding.batch_sharding(mesh), cfg.train.batch_size),
    )
    start = start_source(cfg, folder)
    data, resumable = _prepare(cfg, folder, console)
    corpus = str(data.summary["source"])
    unigram = float(data.summary["unigram_bits_per_byte"])
    with contextlib.ExitStack() as stack:
        hold_workdir(stack, folder)
        progress = stack.enter_context(Progress(console, unigram))
        checkpoints = stack.enter_context(Checkpointer(folder, cfg, data.identity))
        transform = make_transform(cfg)
        state = first_state(cfg, mesh, transform, checkpoints, progress, start)
        first = int(state.step)
        metrics = open_metrics(stack, folder, first if resumable else None, monitor)
        profiler = stack.enter_context(Profiler(monitor, folder, progress.note))
        first_screen.show(console, cfg, mesh, data, folder, first)
        about = about_run(cfg, first, command, corpus)
        metrics.write("run", first, **about, unigram_bits_per_byte=unigram)
        run = _Run(
            cfg,
            folder,
            mesh,
            data,
            share,
            transform,
            checkpoints,
            metrics,
            progress,
            profiler,
        )
        with Interrupt("this step") as interrupt:
            state = _steps(run, state, interrupt)
        _write_sample(run, state)
        metrics.write("run", cfg.train.steps, event="end")
    report = distributed.on_leader(
        "report", lambda: str(build_report(folder)), timeout=READ_SECONDS
    )
    console.print(Text(f"report: {report}"), soft_wrap=True)


def _prepare(
    cfg: Config, folder: pathlib.Path, console: Console
) -> tuple[loader.Data, bool]:
    """The batches, and whether there is a run to resume in the workdir, now ours.

    The leader makes the token stores; the others read them when they are finished.
    """
    made: list[loader.Data] = []

    def prepare() -> dict[str, Any]:
        workdir.check(folder, cfg)
        made.append(_load_data(cfg, folder, console))
        check_lengths(cfg, made[0])
        resumable = workdir.claim(folder, cfg)
        return {"resumable": resumable, "identity": made[0].identity}

    def load() -> loader.Data:
        if made:
            return made[0]
        if not (folder / workdir.CONFIG).exists():
            raise UserError(
                f"--workdir={folder} is not the folder that process 0 writes; name "
                "one on a disk that all hosts share"
            )
        data = _load_data(cfg, folder, console)
        if data.identity != leaders["identity"]:
            raise UserError(
                f"the text differs from that of process 0: {data.identity} here, "
                f"{leaders['identity']} there; give all hosts the same files"
            )
        return data

    leaders = distributed.on_leader(
        "workdir and tokens", prepare, timeout=_TOKENIZE_SECONDS
    )
    return distributed.on_all("reading the text", load), leaders["resumable"]


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


def _steps(run: _Run, state: State, interrupt: Interrupt) -> State:
    """Train to the last step; logs, evaluates and saves on the way."""
    cfg, first, last = run.cfg.train, int(state.step), run.cfg.train.steps
    if first >= last:
        run.progress.note(f"already finished: step {first} of {last}")
        return state
    take_step, evaluate = _compile(run, state)
    log = StepLog(run.cfg, run.data, run.metrics, run.progress, run.mesh, run.share)
    alarm = Alarm(run.cfg.alerts, run.metrics, run.progress)
    reader = loader.Reader(run.data.train, *run.share)
    for step, host in enumerate(log.batches(reader, first, last), first + 1):
        state, metrics = take_step(step, state, host)
        stop = interrupt.agreed()
        log.add(metrics, host)
        _report_saves(run)
        alerts = []
        due = {every: step % every == 0 or step == last for every in _intervals(cfg)}
        if due[cfg.log_every] or stop:
            take_step.settle(state)
            alerts = alarm.see(log.write(step, metrics, state))
        if due[cfg.eval_every]:
            with log.aside():
                record = run.metrics.write("eval", step, **evaluate(state))
            run.progress.update(record, step, last)
        if due[cfg.checkpoint_every] or stop or alerts:
            take_step.settle(state)
            with log.aside():
                # First the records: a durable step never lacks those that lead to it.
                run.metrics.flush()
                run.checkpoints.save(state)
        end_early(
            step,
            stop,
            alerts,
            run.folder,
            run.checkpoints,
            run.metrics,
            run.progress,
        )
    run.checkpoints.wait()
    _report_saves(run)
    return state


def _report_saves(run: _Run) -> None:
    report_durable(run.checkpoints, run.metrics, run.progress)


def _intervals(cfg: Any) -> set[int]:
    return {cfg.log_every, cfg.eval_every, cfg.checkpoint_every}


def _compile(run: _Run, state: State) -> tuple[GuardedStep, Evaluator]:
    """The train step and the evaluation, compiled before the first step is timed."""
    run.progress.note("compiling the train step ...")
    started = time.monotonic()
    lowered = lower_step(PRE_TRAINING, run.cfg, run.mesh, run.transform, state)
    compiled = lowered.compile()
    traced = run.profiler.around(compiled, int(state.step))
    take_step = GuardedStep(
        traced,
        run.cfg,
        run.mesh,
        run.folder,
        run.metrics,
        run.progress,
        text_feed(run.mesh, run.share),
    )
    evaluate = Evaluator(run.cfg, run.data, run.mesh, state)
    run.progress.note(f"compiled in {time.monotonic() - started:.1f} s")
    return take_step, evaluate


def _write_sample(run: _Run, state: State) -> None:
    """`sample.txt`: the prompt and what the trained model makes of it."""
    cfg, tokenizer = run.cfg.sample, run.data.tokenizer
    run.progress.note(f"sampling {cfg.num_tokens} tokens ...")
    prompt = [tokenizer.bos, *tokenizer.encode(cfg.prompt.encode()).tolist()]
    spoken = np.flatnonzero(tokenizer.bytes_per_token)
    generator = Generator(
        run.cfg.model,
        {"params": state.params, "balance": state.balance},
        slots=sharding.row_shards(run.mesh),
        length=len(prompt) + cfg.num_tokens,
        mesh=run.mesh,
        # All of the prompt and the answer in one call: one program to compile.
        decode_steps=len(prompt) + cfg.num_tokens,
        allowed=np.isin(np.arange(run.cfg.model.vocab_size), spoken),
    )
    sampling = Sampling(cfg.temperature)
    ask = Ask(cfg.num_tokens, sampling, seed=run.cfg.train.seed)
    (done,) = generator.generate([Request(tuple(prompt), ask)])
    text = tokenizer.decode([*prompt, *done.tokens])
    if distributed.is_leader():
        replace_file(run.folder / "sample.txt", text + "\n")
