"""What the policy is moved by, token by token, and what is watched meanwhile.

With pi the policy of now, old the learner's policy before the steps of an iteration,
mu the sampler's, and A the advantage of a token:

    ratio        r = pi / old of the token, or, for "sequence", of the trajectory: the
                 geometric mean over its policy tokens
    surrogate    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    correction   times min(old / mu, correction_cap), a constant to the gradient
    reference    + kl_weight (ref / pi - log(ref / pi) - 1)
    entropy      - entropy_weight H
    distillation A + distill_weight log(teacher / pi), a constant to the gradient

Sources are in docs/rl_learning.md. All are means over the policy tokens of the whole
batch, or over its trajectories of the mean over the policy tokens of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.config import RL
from kimi_jax.errors import UserError
from kimi_jax.rl.experience import Experience
from kimi_jax.train.step import Report

# Log-ratios are cut here: a ratio of 5e8 is no better than one of inf, but finite.
_MOST = 20.0


class Totals(NamedTuple):
    """Counts over the whole batch, at least one each."""

    policy_tokens: jax.Array  # sum of weights
    trajectories: jax.Array  # that have any weight
    tokens: jax.Array  # positions that are not padding


def count(experience: Experience) -> Totals:
    weights_BT, ids_BT = experience.weights_BT, experience.segment_ids_BT
    sums_BS = _sums(weights_BT, ids_BT)
    return Totals(
        jnp.maximum(jnp.sum(weights_BT), 1.0),
        jnp.maximum(jnp.sum(sums_BS[:, 1:] > 0), 1),
        jnp.maximum(jnp.sum(ids_BT > 0), 1),
    )


def normaliser(totals: Totals, aggregate: str) -> jax.Array:
    """By which the sums of `policy_loss` become means."""
    return totals.policy_tokens if aggregate == "token" else totals.trajectories


def policy_loss(
    logprob_BT: jax.Array,
    entropy_BT: jax.Array,
    experience: Experience,
    rl: RL,
) -> tuple[jax.Array, Report]:
    """The loss, summed over what it is a mean of, and what `summary` makes means of.

    Args:
      logprob_BT: log pi of the targets; gradients flow through it and the next alone.
      entropy_BT: of pi at each position.

    Raises:
      UserError: a term whose log-probabilities the experience lacks.
    """
    check(experience, rl)
    now = jax.lax.stop_gradient(logprob_BT)
    old_BT = experience.behaviour_BT if experience.old_BT is None else experience.old_BT
    advantages_BT = experience.advantages_BT
    if rl.distill_weight:
        learn_BT = experience.teacher_BT - now
        advantages_BT = advantages_BT + rl.distill_weight * learn_BT
    ratio_BT = jnp.exp(_log_ratio(logprob_BT, old_BT, experience, rl.ratio))
    low, high = 1 - rl.clip_low, 1 + rl.clip_high
    clipped_BT = jnp.clip(ratio_BT, low, high)
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    correction_BT = jnp.ones_like(now)
    if rl.correction_cap is not None:
        correction_BT = jnp.exp(_cut(old_BT - experience.behaviour_BT))
        loss_BT *= jnp.minimum(correction_BT, rl.correction_cap)
    if rl.kl_weight:
        loss_BT += rl.kl_weight * _k3(experience.reference_BT - logprob_BT)
    loss_BT -= rl.entropy_weight * entropy_BT
    weights_BT = experience.weights_BT
    if rl.aggregate == "sequence":
        own_BT = _of_document(weights_BT, experience.segment_ids_BT)
        weights_BT = weights_BT / jnp.where(own_BT > 0, own_BT, 1)
    # Where the weight is 0 nothing may reach the gradient, not even 0 times inf.
    loss_sum = jnp.sum(jnp.where(weights_BT > 0, weights_BT * loss_BT, 0))
    watched = {
        "clip_low": (advantages_BT < 0) & (ratio_BT < low),
        "clip_high": (advantages_BT > 0) & (ratio_BT > high),
        "correction": correction_BT,
        "entropy": entropy_BT,
        **_drift(now, experience),
    }
    if rl.correction_cap is not None:
        watched["correction_capped"] = correction_BT > rl.correction_cap
    return loss_sum, _report(watched, ratio_BT, now, experience)


def summary(report: Report, totals: Totals) -> dict[str, jax.Array]:
    """Metrics of a step, from the reports of its micro-batches.

    Means over policy tokens: kl_sampler_k1 and kl_sampler_k3 (two estimates of the
    divergence from sampler to policy, nats a token), logprob_gap (absolute), clip_low
    and clip_high (shares whose gradient the clipping took), correction, and
    correction_capped (a share), entropy, and if there is such a policy kl_reference and
    kl_teacher. Largest of all: ratio_max, logprob_gap_max. effective_samples is the
    share of the tokens that would weigh as much as the weighted ones; policy_share, of
    positions whose target the policy wrote.
    """
    sums = dict(report.sums)
    weight, weight_2 = sums.pop("importance"), sums.pop("importance_2")
    tokens = totals.policy_tokens
    metrics = {name: x / tokens for name, x in sums.items()} | report.maxima
    some = jnp.maximum(tokens * weight_2, jnp.finfo(weight_2.dtype).tiny)
    metrics["effective_samples"] = weight**2 / some
    metrics["policy_share"] = tokens / totals.tokens
    return metrics


def routing_overlap(stats: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Share of the replayed experts that the router of here would have chosen."""
    agreed, replayed = (
        sum(jnp.sum(x) for name, x in stats.items() if name.endswith(end))
        for end in ("/agreed_slots", "/replayed_slots")
    )
    if isinstance(replayed, int):  # nothing was replayed anywhere
        return {}
    return {"routing_overlap": agreed / jnp.maximum(replayed, 1)}


def check(experience: Experience, rl: RL) -> None:
    """Raises UserError if a term needs log-probabilities that are not there."""
    for field, weight, name in (
        ("kl_weight", rl.kl_weight, "reference_BT"),
        ("distill_weight", rl.distill_weight, "teacher_BT"),
    ):
        if weight and getattr(experience, name) is None:
            raise UserError(
                f"config.rl.{field}={weight}, and the experience has no {name}; score "
                "it under that policy first, or set the weight to 0"
            )


def _log_ratio(
    logprob_BT: jax.Array, old_BT: jax.Array, experience: Experience, form: str
) -> jax.Array:
    token_BT = logprob_BT - old_BT
    if form == "token":
        return _cut(token_BT)
    weights_BT, ids_BT = experience.weights_BT, experience.segment_ids_BT
    own_BT = _of_document(weights_BT, ids_BT)
    now = jax.lax.stop_gradient(token_BT)
    total_BT = _of_document(jnp.where(weights_BT > 0, weights_BT * now, 0), ids_BT)
    mean_BT = total_BT / jnp.where(own_BT > 0, own_BT, 1)
    # The value of the sequence, the gradient of the token: GSPO-token.
    return _cut(mean_BT) + token_BT - now


def _drift(now: jax.Array, experience: Experience) -> dict[str, jax.Array]:
    """How far the policy is from the sampler, the reference and the teacher."""
    behind_BT = now - experience.behaviour_BT
    found = {
        "kl_sampler_k1": -behind_BT,
        "kl_sampler_k3": _k3(behind_BT),
        "logprob_gap": jnp.abs(behind_BT),
        "importance": jnp.exp(_cut(behind_BT)),
        "importance_2": jnp.exp(2 * _cut(behind_BT)),
    }
    if experience.reference_BT is not None:
        found["kl_reference"] = _k3(experience.reference_BT - now)
    if experience.teacher_BT is not None:
        found["kl_teacher"] = now - experience.teacher_BT
    return found


def _report(
    watched: Mapping[str, jax.Array],
    ratio_BT: jax.Array,
    now: jax.Array,
    experience: Experience,
) -> Report:
    """Sums over policy tokens of what is watched, and maxima."""
    weights_BT = experience.weights_BT

    def own(x_BT: Any) -> jax.Array:
        return jnp.where(weights_BT > 0, jax.lax.stop_gradient(x_BT), 0)

    sums = {name: jnp.sum(weights_BT * own(x)) for name, x in watched.items()}
    gap_BT = jnp.abs(now - experience.behaviour_BT)
    largest = {"ratio_max": ratio_BT, "logprob_gap_max": gap_BT}
    return Report(sums, {name: jnp.max(own(x)) for name, x in largest.items()})


def _k3(log_ratio: jax.Array) -> jax.Array:
    """exp(x) - x - 1: its mean over samples of p, x = log q / p, is KL(p || q)."""
    x = _cut(log_ratio)
    return jnp.expm1(x) - x


def _cut(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -_MOST, _MOST)


def _sums(x_BT: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """[B, T + 1]: the sum over each segment of a row, padding first."""
    size = x_BT.shape[1] + 1
    return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, size))(x_BT, ids_BT)


def _of_document(x_BT: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """For each token the sum over its segment."""
    return jnp.take_along_axis(_sums(x_BT, ids_BT), ids_BT, axis=1)
