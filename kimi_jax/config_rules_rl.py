"""What must hold in `config.rl`, each rule with its fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kimi_jax.config import RL, Config, ffn_kinds

_SIZES = (
    "iterations",
    "groups",
    "group_size",
    "steps_per_iteration",
    "turn_tokens",
    "max_turns",
    "max_tokens",
    "max_calls",
    "slots",
    "decode_steps",
    "length_budget",
    "segment",
    "eval_tasks",
)
_NOT_NEGATIVE = (
    "turn_credit",
    "length_penalty",
    "kl_weight",
    "entropy_weight",
    "distill_weight",
    "max_staleness",
    "keep_trajectories",
)


def check(config: Config) -> list[str]:
    """Every broken rule of the section; none where there is no section."""
    if config.rl is None:
        return []
    rl = config.rl
    problems = list(_numbers(rl))
    problems += _rollouts(rl, config)
    problems += _learning(rl, config)
    problems += _distances(rl)
    problems += _sampler(rl)
    return problems


def _numbers(rl: RL) -> Iterator[str]:
    for name in _SIZES:
        if _under(rl, name, 1):
            yield f"config.rl.{name}={getattr(rl, name)}: must be at least 1"
    for name in _NOT_NEGATIVE:
        if _under(rl, name, 0):
            yield f"config.rl.{name}={getattr(rl, name)}: must not be negative"
    for name in ("temperature", "clip_low", "clip_high", "max_seconds"):
        value = getattr(rl, name)
        if value is not None and not value > 0:
            yield f"config.rl.{name}={value}: must be positive"
    if rl.clip_low > 1.0:
        yield (
            f"config.rl.clip_low={rl.clip_low}: must be at most 1; ratios are positive"
        )
    if not 0.0 < rl.top_p <= 1.0:
        yield f"config.rl.top_p={rl.top_p}: must be in (0, 1]; 1 draws from all tokens"
    if rl.correction_cap is not None and rl.correction_cap < 1.0:
        yield (
            f"config.rl.correction_cap={rl.correction_cap}: must be at least 1, the "
            "weight of a token that the policy itself has drawn; none turns it off"
        )
    if rl.turn_credit > 1.0:
        yield f"config.rl.turn_credit={rl.turn_credit}: a share, at most 1"


def _under(rl: RL, name: str, least: int) -> bool:
    value: Any = getattr(rl, name)
    return value is not None and value < least


def _rollouts(rl: RL, config: Config) -> Iterator[str]:
    if not rl.environments:
        yield (
            "config.rl.environments=(): empty; name at least one, such as "
            "('tools:difficulty=1',)"
        )
    if rl.turn_tokens > rl.max_tokens:
        yield (
            f"config.rl.turn_tokens={rl.turn_tokens}: more than max_tokens="
            f"{rl.max_tokens}; a turn has to fit into its trajectory"
        )
    if rl.slots == 1 and rl.group_size > 1:
        yield (
            "config.rl.slots=1: a prompt and a member of its group lie side by side; "
            "use at least 2"
        )
    length = config.train.seq_len
    if rl.max_tokens > length + 1:
        yield (
            f"config.rl.max_tokens={rl.max_tokens}: a trajectory lies in one row of "
            f"config.train.seq_len={length} targets; use max_tokens={length + 1} or "
            f"less, or seq_len={rl.max_tokens}"
        )
    if rl.rollout_mesh is not None:
        sizes = dataclasses.asdict(rl.rollout_mesh)
        for axis, size in sizes.items():
            if size < 1:
                yield f"config.rl.rollout_mesh.{axis}={size}: must be at least 1"
    if config.train.row_patches:
        yield (
            f"config.train.row_patches={config.train.row_patches}: environments show "
            "no images; use row_patches=0 and row_items=0"
        )


def _learning(rl: RL, config: Config) -> Iterator[str]:
    train, steps = config.train, rl.iterations * rl.steps_per_iteration
    if train.steps != steps:
        yield (
            f"config.train.steps={train.steps}: must be rl.iterations="
            f"{rl.iterations} times rl.steps_per_iteration={rl.steps_per_iteration}; "
            f"use train.steps={steps}"
        )
    if rl.group_size == 1 and rl.advantage != "none":
        yield (
            f"config.rl.group_size={rl.group_size}: advantage={rl.advantage!r} "
            "compares the members of a group; use at least 2"
        )
    if rl.rewards == "none" and not rl.teacher:
        yield (
            "config.rl.rewards='none': then only a teacher tells what to learn; set "
            "config.rl.teacher, or use rewards='task'"
        )
    if rl.replay_routes and "moe" not in ffn_kinds(config.model):
        yield (
            "config.rl.replay_routes=True: the model has no experts; use "
            "replay_routes=False"
        )
    if rl.segment is not None and rl.segment >= 1 and train.seq_len % rl.segment:
        yield (
            f"config.rl.segment={rl.segment}: does not divide config.train.seq_len="
            f"{train.seq_len}; use a divisor, or none for whole rows"
        )
    if rl.segment is not None and config.mesh.context not in (1, -1):
        yield (
            f"config.rl.segment={rl.segment}: rows are split over "
            f"config.mesh.context={config.mesh.context} already; use segment=none"
        )


def _distances(rl: RL) -> Iterator[str]:
    """Rules of what ties the policy to others, and of old experience."""
    if bool(rl.teacher) != bool(rl.distill_weight):
        yield (
            f"config.rl.teacher={rl.teacher!r}, distill_weight={rl.distill_weight}: "
            "set both, or neither"
        )
    if rl.kl_weight and not rl.kl_to:
        yield (
            f"config.rl.kl_weight={rl.kl_weight}: kl_to='' names no reference; use "
            "'start', or a checkpoint"
        )
    if not 0.0 <= rl.reuse < 1.0:
        yield f"config.rl.reuse={rl.reuse}: a share of a batch, in [0, 1)"
    for name, used in (("reuse", rl.reuse > 0.0), ("max_calls", bool(rl.max_calls))):
        if used and rl.max_staleness < 1:
            yield (
                f"config.rl.{name}={getattr(rl, name)}: learns from older versions of "
                "the policy, which max_staleness=0 forbids; use max_staleness=1 or more"
            )


def _sampler(rl: RL) -> Iterator[str]:
    where, sampler = "config.rl.sampler", rl.sampler
    low, high = sampler.target_low, sampler.target_high
    if not 0.0 < low <= high < 1.0:
        yield (
            f"{where}.target_low={low}, target_high={high}: must be success rates with "
            "0 < target_low <= target_high < 1"
        )
    if not 0.0 < sampler.floor <= 1.0:
        yield (
            f"{where}.floor={sampler.floor}: must be in (0, 1], or a task that always "
            "fails is never tried again"
        )
    if not 0.0 <= sampler.ema < 1.0:
        yield f"{where}.ema={sampler.ema}: must be in [0, 1); 0 keeps no history"
    threshold = sampler.length_threshold
    if not 0.0 <= threshold <= 1.0:
        yield (
            f"{where}.length_threshold={threshold}: a success rate; 0 draws all "
            "lengths from the start"
        )
