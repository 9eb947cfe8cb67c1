"""Stage after stage: the training loop of one run, from one checkpoint to the next.

    RUN/tokens/                 the text, tokenised once for all stages
        curriculum.json         the decisions so far
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

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from kimi_jax import distributed, sharding
from kimi_jax.curriculum import criteria, report
from kimi_jax.curriculum.criteria import Verdict
from kimi_jax.curriculum.stages import Stage
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics, runs
from kimi_jax.monitor.tokenizing import tokenizing_lines
from kimi_jax.train import checkpoint_files, loop, workdir
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
        _named(stage, lambda stage=stage: sharding.make_mesh(stage.config))  # type: ignore[misc]
    identity = distributed.on_leader(
        "curriculum", lambda: _prepare(stages, root, console), timeout=_PREPARE_SECONDS
    )
    for before, stage in zip((None, *stages), stages, strict=False):
        while True:
            decisions = _read(root)
            if _last(decisions, stage) == "advance":
                break
            _train_round(root, before, stage, identity, console, command)
            verdict = _decide(root, stage)
            if distributed.is_leader():
                for line in (f"{stage.name}: {verdict.action}", *verdict.reasons):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            if verdict.action == "stop":
                raise Stopped(
                    f"{stage.name} did not meet its criteria: "
                    f"{'; '.join(verdict.reasons)}\nallow it more `rounds`, or relax "
                    "`until`, and run the same command to go on from here"
                )
    if distributed.is_leader():
        console.print(f"all stages are done: {root / 'report.md'}", soft_wrap=True)


def rounds_of(decisions: Sequence[Decision], stage: Stage) -> int:
    """The round that a stage is in, from 1."""
    stays = [d for d in decisions if d["stage"] == stage.name and d["action"] == "stay"]
    return 1 + len(stays)


def hand_over(
    source: tuple[pathlib.Path, Stage],
    target: tuple[pathlib.Path, Stage],
    identity: dict[str, str],
) -> None:
    """Makes the newest state of one stage the checkpoint 0 of the next one.

    Every process of the run calls it; the arrays go from the files of the one to the
    devices as the mesh of the other wants them, and back to files.
    """
    (old_folder, old), (folder, stage) = source, target
    cfg = stage.config
    shapes = state_shape(cfg, sharding.make_mesh(cfg), make_transform(cfg))
    with Checkpointer(old_folder, old.config, identity) as checkpoints:
        state = checkpoints.restore(shapes)
    with Checkpointer(folder, cfg, identity) as checkpoints:
        checkpoints.save(restart_clock(state))
        checkpoints.wait()


def _train_round(
    root: pathlib.Path,
    before: Stage | None,
    stage: Stage,
    identity: dict[str, str],
    console: Console,
    command: str,
) -> None:
    """The stage's run to the end of its round, from wherever it is."""
    folder = root / stage.name
    cfg = stage.at(rounds_of(_read(root), stage))

    def open_folder() -> dict[str, Any]:
        (root / workdir.TOKENS).mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        link = folder / workdir.TOKENS
        if not link.is_symlink():
            link.symlink_to(pathlib.Path("..") / workdir.TOKENS)
        if (folder / workdir.CONFIG).exists():
            workdir.prolong(folder, cfg)
        workdir.claim(folder, cfg)
        newest = runs.newest_records(folder).get("run", {})
        steps = checkpoint_files.steps(folder)
        ended = newest.get("event") == "end" and newest["step"] == cfg.train.steps
        return {"ended": ended, "fresh": not steps}

    state = distributed.on_leader("stage", open_folder, timeout=_READ_SECONDS)
    if state["ended"]:
        return
    if state["fresh"] and before is not None:
        hand_over((root / before.name, before), (folder, stage), identity)
    if distributed.is_leader():
        console.print(f"== {stage.name} ==", soft_wrap=True)
    try:
        loop.train(cfg, str(folder), console=console, command=command)
    except loop.Interrupted:
        raise
    except UserError as error:
        words = str(error).splitlines()[0]
        if distributed.is_leader():
            _write(root, stage, Verdict("stop", (words,)))
        raise


def _decide(root: pathlib.Path, stage: Stage) -> Verdict:
    """The leader's verdict on a finished round, noted and told to all."""

    def decide() -> list[Any]:
        rounds = rounds_of(_read(root), stage)
        evaluations = runs.load_run(root / stage.name).eval
        verdict = criteria.judge(
            stage.until, evaluations, stage.config.train.seq_len, stage.rounds - rounds
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
    for stage in stages:
        if (root / stage.name / workdir.CONFIG).exists():
            cfg = stage.at(rounds_of(_read(root), stage))
            workdir.prolong(root / stage.name, cfg)
            workdir.check(root / stage.name, cfg)
    identity: dict[str, str] = {}
    for stage in stages:
        data = _named(stage, lambda stage=stage: _load(stage, root, console))  # type: ignore[misc]
        if "position_gap" in stage.until and not _reaches(data.validation):
            length = stage.config.train.seq_len
            raise UserError(
                f"{stage.name}: position_gap can never be met, as no held-out document "
                f"reaches the last positions of a row of {length:,} tokens in "
                f"{len(data.validation)} batches; add longer documents, or raise "
                "config.data.validation_fraction or config.train.eval_batches"
            )
        identity = data.identity
    return identity


def _load(stage: Stage, root: pathlib.Path, console: Console) -> loader.Data:
    try:
        return loader.load_data(
            stage.config,
            root / workdir.TOKENS,
            lambda source: tokenizing_lines(console, source),
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _reaches(batches: loader.EvalBatches) -> bool:
    """Whether some document has tokens in the last bin of positions of its row."""
    last = 1 << (batches.length - 1).bit_length() - 1
    for step in range(len(batches)):
        for row_T in batches[step]["segment_ids"]:
            if np.bincount(row_T)[1:].max(initial=0) > last:
                return True
    return False


def _named[T](stage: Stage, act: Any) -> Any:
    try:
        return act()
    except UserError as error:
        raise UserError(f"{stage.name}: {error}") from error


def _last(decisions: Sequence[Decision], stage: Stage) -> str:
    mine = [d["action"] for d in decisions if d["stage"] == stage.name]
    return mine[-1] if mine else ""


def _read(root: pathlib.Path) -> list[Decision]:
    """The decisions so far; the leader writes them, the others read its file."""
    path = root / DECISIONS
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text())["decisions"]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged: {error}; delete it, and finished stages are judged anew"
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
    text = json.dumps({"decisions": metrics.to_jsonable(decisions)}, indent=2)
    metrics.replace_file(root / DECISIONS, text + "\n")
    report.write(root, decisions)
