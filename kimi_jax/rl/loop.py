"""A run of reinforcement learning, read from top to bottom.

Claim the workdir, place the state on the mesh, fresh or restored; then, iteration after
iteration:

    draw tasks -> the policy acts on them -> advantages within groups -> optimizer steps
    -> the new policy moves into the generator -> log, evaluate, save

All that the next iteration depends on is in a checkpoint: parameters, optimizer, router
biases, success rates, groups that wait, and trajectories in the middle of a turn with
what the cache holds of them. Whatever ends a run early, the same command resumes it
exactly.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from kimi_jax import sharding
from kimi_jax.config import RL, Config
from kimi_jax.errors import UserError
from kimi_jax.monitor.console import Progress, print_first_screen
from kimi_jax.monitor.metrics import Record, Writer
from kimi_jax.monitor.report import build_report
from kimi_jax.rl import archive, health, players, storage
from kimi_jax.rl.learner import Learner
from kimi_jax.rl.memory import Memory
from kimi_jax.rl.players import World
from kimi_jax.rl.rollout import Rollouts
from kimi_jax.rl.task_sampler import held_out
from kimi_jax.train import first_screen, optimizer, workdir
from kimi_jax.train.alarm import Alarm
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.interrupt import Interrupt
from kimi_jax.train.profile import Profiler
from kimi_jax.train.session import (
    about_run,
    end_early,
    first_state,
    hold_workdir,
    open_metrics,
    report_durable,
    start_source,
)
from kimi_jax.train.step import State, make_transform


class _Run(NamedTuple):
    """What the phases of a run share."""

    cfg: Config
    rl: RL
    folder: pathlib.Path
    world: World
    acting: jax.sharding.Mesh  # where trajectories are written
    rollouts: Rollouts
    memory: Memory
    learner: Learner
    checkpoints: Checkpointer
    metrics: Writer
    progress: Progress
    alarm: Alarm


def reinforce(cfg: Config, path: str, *, console: Console, command: str = "") -> None:
    """Run `cfg` to its last iteration in the workdir `path`.

    Raises:
      UserError: the workdir, environments, checkpoint or mesh does not fit, a step is
        not finite, an alert says stop, or the run was interrupted. Finished
        checkpoints stay intact.
    """
    rl = _section(cfg)
    folder = pathlib.Path(path)
    mesh = sharding.make_mesh(cfg)
    first_screen.kda_kernel(cfg, mesh)  # said before anything is written
    acting = players.rollout_mesh(cfg, mesh)
    world = players.make_world(cfg, rl.environments)
    workdir.check(folder, cfg)
    start = start_source(cfg, folder)
    resumable = workdir.claim(folder, cfg)
    with contextlib.ExitStack() as stack:
        hold_workdir(stack, folder)
        progress = stack.enter_context(Progress(console, curve="success"))
        identity = _identity(rl, world)
        checkpoints = stack.enter_context(Checkpointer(folder, cfg, identity))
        transform = make_transform(cfg)
        state = first_state(cfg, mesh, transform, checkpoints, progress, start)
        first = int(state.step)
        metrics = open_metrics(stack, folder, first if resumable else None, cfg.monitor)
        _show(console, cfg, mesh, acting, world, folder, first)
        profiler = stack.enter_context(Profiler(cfg.monitor, folder, progress.note))
        about = about_run(cfg, first, command, ", ".join(rl.environments))
        metrics.write("run", first, **about)
        if not first and start is None:
            progress.note(
                "warning: from random parameters hardly anything is ever rewarded; "
                "begin with a warm start, --config.train.init_from=DIR (docs/rl.md)"
            )
        progress.note("compiling the learner ...")
        around = functools.partial(profiler.around, finished=first)
        learner = Learner(cfg, mesh, transform, folder, metrics, progress, around)
        run = _Run(
            cfg,
            rl,
            folder,
            world,
            acting,
            players.make_rollouts(cfg, world, _variables(state, acting), acting),
            Memory(rl, world.cells, cfg.train.seed),
            learner,
            checkpoints,
            metrics,
            progress,
            Alarm(cfg.alerts, metrics, progress),
        )
        if first:
            kept = storage.from_bytes(checkpoints.restore_extra())
            run.memory.restore(kept["memory"])
            run.rollouts.restore(kept["rollouts"])
        with Interrupt("this iteration") as interrupt:
            _iterations(run, state, interrupt)
        metrics.write("run", cfg.train.steps, event="end")
    console.print(Text(f"report: {build_report(folder)}"), soft_wrap=True)


def _iterations(run: _Run, state: State, interrupt: Interrupt) -> None:
    """Act and learn to the last iteration; logs, evaluates and saves on the way."""
    train, last = run.cfg.train, run.cfg.train.steps
    if not int(state.step):
        _evaluate(run, state, 0)
    while (before := int(state.step)) < last:
        state, record = _iteration(run, state)
        step = int(state.step)
        alerts = run.alarm.see(record)
        stop = interrupt.agreed()
        if _passed(before, step, train.eval_every) or step == last:
            _evaluate(run, state, step)
        _report_saves(run)
        due = _passed(before, step, train.checkpoint_every) or step == last
        if due or stop or alerts:
            _save(run, state)
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


def _iteration(run: _Run, state: State) -> tuple[State, Record]:
    """One of them: the state after its steps, and its record."""
    rl, memory, rollouts = run.rl, run.memory, run.rollouts
    iteration = memory.iteration
    started = time.monotonic()
    finished = rollouts.run(
        memory.draw(), group_size=rl.group_size, version=memory.version
    )
    acted = time.monotonic() - started
    lesson = memory.lesson(finished)
    state, learned = run.learner.learn(
        state,
        [entry.trajectory for entry in lesson.entries],
        [entry.advantages for entry in lesson.entries],
        memory.version,
    )
    numbers = health.rollout_health(finished, memory.version) | lesson.numbers
    memory.learned(lesson, learned.left)
    rollouts.generator.variables = _variables(state, run.acting)
    archive.write(run.folder, iteration, lesson.finished, rl.keep_trajectories)
    numbers |= learned.numbers | {
        "iteration": iteration + 1,
        "optimizer_steps": learned.steps,
        "waiting_trajectories": len(learned.left),
        "unfinished": len(rollouts.unfinished) + rollouts.waiting,
        **_rollout_times(rollouts, acted),
    }
    step = int(state.step)
    rate = optimizer.schedule(run.cfg.optimizer, run.cfg.train.steps)
    record = run.metrics.write(
        "train", step, learning_rate=float(rate(step - 1)), **learned.record, rl=numbers
    )
    run.progress.update(record, step, run.cfg.train.steps)
    return state, record


def _evaluate(run: _Run, state: State, step: int) -> None:
    """Success on held-out tasks, at the temperature of training."""
    started = time.monotonic()
    cells, seed = run.world.cells, run.cfg.evaluation.seed
    played = players.play(
        run.cfg,
        run.world,
        _variables(state, run.acting),
        run.acting,
        held_out(cells, run.rl.eval_tasks, seed),
        players.sampling(run.rl),
    )
    numbers = health.rollout_health(played, 0)
    seconds = time.monotonic() - started
    record = run.metrics.write("eval", step, rl=numbers, seconds=seconds)
    run.progress.update(record, step, run.cfg.train.steps)


def _save(run: _Run, state: State) -> None:
    kept = {"memory": run.memory.state(), "rollouts": run.rollouts.state()}
    # First the records: a durable step never lacks those that lead to it.
    run.metrics.flush()
    run.checkpoints.save(state, storage.to_bytes(kept))


def _report_saves(run: _Run) -> None:
    report_durable(run.checkpoints, run.metrics, run.progress)


def _variables(state: State, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What the generator writes with, on its mesh."""
    return players.on_mesh({"params": state.params, "balance": state.balance}, mesh)


def _passed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return before // every < after // every


def _rollout_times(rollouts: Rollouts, seconds: float) -> dict[str, float]:
    stats = rollouts.statistics
    return {
        "rollout_seconds": seconds,
        "rollout_tokens_per_second": stats.drawn / seconds,
        "decode_seconds": stats.decode_seconds,
        "read_seconds": stats.read_seconds,
        "environment_seconds": stats.environment_seconds,
    }


def _section(cfg: Config) -> RL:
    """`cfg.rl`; raises UserError where there is none, or too many processes."""
    if cfg.rl is None:
        raise UserError(
            "config.rl is none: use a config that has the section, such as "
            "configs/rl_tools.py, or python -m experiments.train for supervised "
            "training"
        )
    if jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes: reinforcement learning runs in one, "
            "with all devices of its host; use --config.cluster.processes=1"
        )
    return cfg.rl


def _identity(rl: RL, world: World) -> dict[str, str]:
    """What a resumed run must be given again."""
    return {
        "environments": ", ".join(_names(world)),
        "tokenizer": world.form.tokenizer.fingerprint,
    }


def _names(world: World) -> list[str]:
    return [
        f"{cell.environment}:difficulty={cell.difficulty}:length={cell.length}"
        for cell in world.cells
    ]


def _show(
    console: Console,
    cfg: Config,
    mesh: jax.sharding.Mesh,
    acting: jax.sharding.Mesh,
    world: World,
    folder: pathlib.Path,
    first: int,
) -> None:
    """The tables before the first iteration."""
    rl = _section(cfg)
    where = "the same devices" if acting is mesh else sharding.describe(acting)
    trajectories = rl.groups * rl.group_size
    rows: list[tuple[str, Any]] = [
        ("tasks", ", ".join(_names(world))),
        ("rewards", rl.rewards),
        ("an iteration", f"{rl.groups} groups of {rl.group_size} trajectories"),
        ("a trajectory", f"at most {rl.max_tokens:,} tokens in {rl.max_turns} turns"),
        ("in all", f"{trajectories * rl.iterations:,} trajectories"),
        ("written on", f"{where}, {rl.slots} at one time"),
        ("starts from", cfg.train.init_from or "random parameters"),
    ]
    print_first_screen(
        console,
        [
            ("parameters", first_screen.parameter_rows(cfg.model)),
            ("reinforcement learning", rows),
            ("run", first_screen.run_rows(cfg, mesh, folder, first)),
        ],
    )
