"""The optimizer step of reinforcement learning, and the pass that only scores.

The step is that of pre-training with another objective: the same micro-batches, meshes,
rematerialisation, clipping, statistics and guard against what is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from kimi_jax import canonical, config
from kimi_jax.rl import losses, segments
from kimi_jax.rl.experience import Experience
from kimi_jax.train.step import Objective, Report


def objective(cfg: config.Config) -> Objective:
    """What the steps minimise: see `kimi_jax.rl.losses`.

    Metrics: loss; predicted, tokens that the policy wrote; and rl, those of
    `losses.summary` and, where experts are replayed, routing_overlap.
    """
    assert cfg.rl is not None
    rl = cfg.rl

    def loss(
        params: Any, balance: Any, experience: Experience, totals: losses.Totals
    ) -> tuple[jax.Array, Any]:
        losses.check(experience, rl)
        if not rl.replay_routes:
            experience = experience._replace(routes_BTLA=None)
        variables = {"params": params, "balance": balance}
        found, stats = segments.score(
            cfg, variables, _rows(experience), length=rl.segment, observe=True
        )
        loss_sum, report = losses.policy_loss(*found[:2], experience, rl)
        share = loss_sum / losses.normaliser(totals, rl.aggregate)
        said = report.sums | {"loss": jax.lax.stop_gradient(share)}
        weight = cfg.model.moe.balancing.aux_weight
        share += weight * found.balance_loss / totals.tokens
        return share, (report._replace(sums=said), jax.lax.stop_gradient(stats))

    def metrics(
        report: Report, stats: Mapping[str, jax.Array], totals: losses.Totals
    ) -> dict[str, Any]:
        sums = dict(report.sums)
        loss = sums.pop("loss")
        said = losses.summary(report._replace(sums=sums), totals)
        said |= losses.routing_overlap(stats)
        return {"loss": loss, "predicted": totals.policy_tokens, "rl": said}

    return Objective(loss, losses.count, metrics, rl.update_balance)


def make_score(
    cfg: config.Config, segment: int | None = None
) -> Callable[[Any, Any, Experience], tuple[jax.Array, jax.Array, jax.Array | None]]:
    """(params, balance, experience) -> (logprob_BT, entropy_BT, routes_BTLA).

    Log-probabilities of the targets and entropies under these parameters, in nats, and
    the experts that each token used; None if there are none. Experts are replayed if
    the experience has some: without its `routes_BTLA` the router's own choice is found.
    Nothing is differentiated; rows are scored all at once, without micro-batches.

    Args:
      segment: as `config.rl.segment`; None: whole rows.
    """
    routes = "moe" in config.ffn_kinds(cfg.model)

    def score(
        params: Any, balance: Any, experience: Experience
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        variables = {"params": params, "balance": balance}
        found, stats = segments.score(
            cfg, variables, _rows(experience), length=segment, routes=routes
        )
        chosen = canonical.routes(cfg.model, stats) if routes else None
        return *found[:2], chosen

    return score


def _rows(experience: Experience) -> segments.Rows:
    return segments.Rows(
        experience.tokens_BT,
        experience.targets_BT,
        experience.segment_ids_BT,
        experience.routes_BTLA,
    )
