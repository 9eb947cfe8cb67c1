"""Stage after stage: the training loop of one run, from one checkpoint to the next.

    RUN/tokens/                 the text, tokenised once for all stages
        curriculum.json         the decisions so far
        needles/                recall after each round, where it is a criterion
        report.md               stages, decisions, loss over all tokens
        stage_01_8192/          the workdir of a run, with tokens/ linked to the above
        stage_02_65536/         the same; its checkpoint 0 is the last one of stage 1

A stage starts from the parameters, router biases and moments of the one before, on its
own mesh, with step, schedule and data from the beginning. Checkpoint 0 hands them over,
so each stage can be resumed, evaluated and reported by the same commands as any run,
and the loop knows nothing of stages. A stage that stays is the same run made longer.

All that is decided is derived from files, in this order: checkpoints, evaluations,
decisions. So a kill at any point repeats at most what had not become durable.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from kimi_jax import distributed, sharding
from kimi_jax.config import Config
from kimi_jax.curriculum import criteria, report
from kimi_jax.curriculum.criteria import Verdict
from kimi_jax.curriculum.stages import Stage
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.evals.cells import make_text, plan
from kimi_jax.evals.run import evaluate, read_json
from kimi_jax.monitor import metrics, runs
from kimi_jax.monitor.tokenizing import tokenizing_lines
from kimi_jax.train import checkpoint_files, loop, session, workdir
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.program import state_shape
from kimi_jax.train.step import make_transform, restart_clock

DECISIONS = "curriculum.json"
_PREPARE_SECONDS = 7 * 24 * 3600  # a corpus takes as long as it takes
_READ_SECONDS = 600

Decision = dict[str, Any]


class Stopped(UserError):
    """A stage did not meet its criteria."""


def run(
    stages: Sequence[Stage], path: str, *, console: Console, command: str = ""
) -> None:
    """Trains all stages in the folder `path`, or what is left of them.

    Raises:
      UserError: the stages, their meshes or the text do not fit, which is found before
        anything runs; a stage did not meet its criteria; or see `loop.train`.
    """
    root = pathlib.Path(path)
    for stage in stages:
        _named(stage, functools.partial(sharding.make_mesh, stage.config))
    identity = distributed.on_leader(
        "curriculum", lambda: _prepare(stages, root, console), timeout=_PREPARE_SECONDS
    )
    if not distributed.is_leader():
        console = Console(quiet=True, force_terminal=False)
    for before, stage in zip((None, *stages), stages, strict=False):
        verdict = Verdict("stay", ())
        while verdict.action == "stay":
            decisions = distributed.on_leader(
                "decisions", lambda: _read(root), timeout=_READ_SECONDS
            )
            if _last(decisions, stage) == "advance":
                break
            cfg = stage.at(rounds_of(decisions, stage))
            if _open(root, stage, cfg) and before is not None:
                source, target = ((root / s.name, s) for s in (before, stage))
                hand_over(source, target, identity)
            _train(root, stage, cfg, console, command)
            verdict = _decide(root, stage, _recall(root, stage, cfg, console))
            for line in (f"{stage.name}: {verdict.action}", *verdict.reasons):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        if verdict.action == "stop":
            raise Stopped(
                f"{stage.name} did not meet its criteria: {'; '.join(verdict.reasons)}"
                "\nallow it more `rounds`, or relax `until`, and run the same command "
                "to go on from here"
            )
    console.print(Text(f"all stages are done: {root / report.PAGE}"), soft_wrap=True)


def rounds_of(decisions: Sequence[Decision], stage: Stage) -> int:
    """The round that a stage is in, from 1."""
    stays = [d for d in decisions if d["stage"] == stage.name and d["action"] == "stay"]
    return 1 + len(stays)


def hand_over(
    source: tuple[pathlib.Path, Stage],
    target: tuple[pathlib.Path, Stage],
    identity: Mapping[str, str],
) -> None:
    """Makes the newest state of one stage the checkpoint 0 of the next one.

    Every process of the run calls it. The arrays go from files to devices, as the mesh
    of the next stage wants them, and back to files.

    Args:
      source, target: folder and stage.
      identity: of the text, see `loader.Data`.
    """
    (old_folder, old), (folder, stage) = source, target
    cfg = stage.config
    shapes = state_shape(cfg, sharding.make_mesh(cfg), make_transform(cfg))
    with Checkpointer(old_folder, old.config, identity) as checkpoints:
        state = checkpoints.restore(shapes)
    with Checkpointer(folder, cfg, identity) as checkpoints:
        checkpoints.save(restart_clock(state))
        checkpoints.wait()


def _open(root: pathlib.Path, stage: Stage, cfg: Config) -> bool:
    """Makes the stage's folder ready; returns whether it has no checkpoint yet."""

    def on_disk() -> bool:
        folder = root / stage.name
        folder.mkdir(exist_ok=True)
        link = folder / workdir.TOKENS
        if not link.is_symlink():
            link.symlink_to(pathlib.Path("..") / workdir.TOKENS)
        if (folder / workdir.CONFIG).exists():
            workdir.prolong(folder, cfg)
        workdir.claim(folder, cfg)
        return not checkpoint_files.steps(folder)

    return distributed.on_leader("stage", on_disk, timeout=_READ_SECONDS)


def _train(
    root: pathlib.Path, stage: Stage, cfg: Config, console: Console, command: str
) -> None:
    """The run of the stage to its last step, from wherever it is."""
    folder = root / stage.name

    def ended() -> bool:
        newest = runs.newest_records(folder).get("run", {})
        return newest.get("event") == "end" and newest["step"] == cfg.train.steps

    if distributed.on_leader("ended", ended, timeout=_READ_SECONDS):
        return
    console.print(f"== {stage.name} ==", soft_wrap=True)
    try:
        loop.train(cfg, str(folder), console=console, command=command)
    except session.Interrupted:
        raise
    except UserError as error:
        if distributed.is_leader():
            _write(root, stage, Verdict("stop", (str(error).splitlines()[0],)))
        raise


def _recall(root: pathlib.Path, stage: Stage, cfg: Config, console: Console) -> float:
    """The share of needles that the stage's last checkpoint finds; NaN: not asked."""
    if criteria.NEEDLE not in stage.until:
        return math.nan
    folder = root / "needles" / f"{stage.name}_step_{cfg.train.steps}"
    folder.parent.mkdir(exist_ok=True)
    task = _needle(stage)
    found = read_json(evaluate(cfg, str(root / stage.name), task, str(folder), console))
    return float(found["results"][0]["accuracy"])


def _needle(stage: Stage) -> str:
    return f"needle:length={stage.config.train.seq_len}"


def _decide(root: pathlib.Path, stage: Stage, recall: float) -> Verdict:
    """The leader's verdict on a finished round, noted and told to all."""

    def decide() -> list[Any]:
        rounds = rounds_of(_read(root), stage)
        evaluations = runs.load_run(root / stage.name).eval
        verdict = criteria.judge(
            stage.until,
            evaluations,
            stage.config.train.seq_len,
            stage.rounds - rounds,
            recall,
        )
        _write(root, stage, verdict)
        return [verdict.action, list(verdict.reasons)]

    action, reasons = distributed.on_leader("verdict", decide, timeout=_READ_SECONDS)
    return Verdict(action, tuple(reasons))


def _prepare(
    stages: Sequence[Stage], root: pathlib.Path, console: Console
) -> dict[str, str]:
    """Makes the text ready and looks for what would stop a later stage.

    Returns:
      The identity of the text, which all stages share.
    """
    _check_folder(root)
    decisions = _read(root)
    for stage in stages:
        if (root / stage.name / workdir.CONFIG).exists():
            cfg = stage.at(rounds_of(decisions, stage))
            workdir.prolong(root / stage.name, cfg)
            workdir.check(root / stage.name, cfg)
    identity: dict[str, str] = {}
    for stage in stages:
        _named(stage, functools.partial(_check_needle, stage))
        data = _named(stage, functools.partial(_load, stage, root, console))
        if "position_gap" in stage.until and not _reaches(data.validation):
            length = stage.config.train.seq_len
            raise UserError(
                f"{stage.name}: position_gap can never be met, as no held-out document "
                f"reaches the last positions of a row of {length:,} tokens in "
                f"{len(data.validation)} batches; add longer documents, or raise "
                "config.data.validation_fraction or config.train.eval_batches"
            )
        identity = data.identity
    (root / workdir.TOKENS).mkdir(parents=True, exist_ok=True)
    if not (root / DECISIONS).exists():
        _store(root, [])
    return identity


def _check_folder(root: pathlib.Path) -> None:
    """Raises UserError where something else than a curriculum lies."""
    if root.exists() and not root.is_dir():
        raise UserError(f"--workdir={root} is a file; name a folder")
    if root.exists() and not (root / DECISIONS).exists():
        others = [p.name for p in root.iterdir() if p.name != workdir.TOKENS]
        if any(not name.startswith(".") for name in others):
            raise UserError(
                f"--workdir={root} is not empty and holds no curriculum; name another "
                "folder, nothing was written"
            )


def _check_needle(stage: Stage) -> None:
    """Raises UserError if recall is a criterion and cannot be measured."""
    if criteria.NEEDLE not in stage.until:
        return
    plan(stage.config, _needle(stage), make_text(stage.config))
    if jax.process_count() > 1:
        raise UserError(
            f"until: {criteria.NEEDLE} is measured in one process, and there are "
            f"{jax.process_count()}; use another criterion, or "
            "--config.cluster.processes=1"
        )


def _load(stage: Stage, root: pathlib.Path, console: Console) -> loader.Data:
    try:
        return loader.load_data(
            stage.config,
            root / workdir.TOKENS,
            lambda source: tokenizing_lines(console, source),
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _reaches(batches: loader.HeldOut) -> bool:
    """Whether some document has tokens in the last bin of positions of its row."""
    last = 2 ** max(0, (batches.length - 1).bit_length() - 1)
    for step in range(len(batches)):
        for row_T in batches[step]["segment_ids"]:
            if np.bincount(row_T)[1:].max(initial=0) > last:
                return True
    return False


def _named[T](stage: Stage, act: Callable[[], T]) -> T:
    """`act()`; a UserError of it names the stage."""
    try:
        return act()
    except UserError as error:
        raise UserError(f"{stage.name}: {error}") from error


def _last(decisions: Sequence[Decision], stage: Stage) -> str:
    mine = [d["action"] for d in decisions if d["stage"] == stage.name]
    return mine[-1] if mine else ""


def _read(root: pathlib.Path) -> list[Decision]:
    """The decisions so far. Of use to the leader, who writes them."""
    path = root / DECISIONS
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text())["decisions"]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged: {error}; bring back a copy of it"
        ) from error


def _write(root: pathlib.Path, stage: Stage, verdict: Verdict) -> None:
    """Notes a verdict; one that stopped the stage before is replaced by it."""
    decisions = [
        d
        for d in _read(root)
        if not (d["stage"] == stage.name and d["action"] == "stop")
    ]
    decisions.append(
        {
            "stage": stage.name,
            "round": rounds_of(decisions, stage),
            "action": verdict.action,
            "reasons": list(verdict.reasons),
        }
    )
    _store(root, decisions)
    report.write(root, decisions)


def _store(root: pathlib.Path, decisions: Sequence[Decision]) -> None:
    text = json.dumps({"decisions": metrics.to_jsonable(decisions)}, indent=2)
    metrics.replace_file(root / DECISIONS, text + "\n")
