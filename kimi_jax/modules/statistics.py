"""What layers report of a forward pass, and how reports become one a step.

A statistic is sown under the name of its kind, as `layer/moe/load_E`, and always covers
the rows that the layer saw; padding never counts. This table says how the reports of
micro-batches combine. Devices need no rule: arrays are global, so a sum or a maximum
over rows already spans them.

    sum      added up
    max      the largest
    mean     sown as a sum over tokens; divided by the tokens of the step
    concat   joined along the token axis, which is the second from the end
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kimi_jax.ops import balancing

# Only the router's update reads these; they are large, or no use to a reader.
_OBSERVED = ("histogram_EQ", "margin_NE", "balance_loss")

REDUCTIONS: dict[str, str] = {
    # MoE: what balancing observes; slots that no expert took, tokens that got none.
    **{k: balancing.reduction(k) for k in ("load_E", "tokens", *_OBSERVED)},
    "dropped_slots": "sum",
    "unrouted_tokens": "sum",
    # Slots whose experts were given, and those of them that the router would choose.
    "replayed_slots": "sum",
    "agreed_slots": "sum",
    # Largest hidden activation of routed experts, shared experts and dense layers.
    "hidden_max": "max",
    # KDA: see kimi_jax.ops.decay. Sums over sampled tokens and over rows.
    **dict.fromkeys(("decay_above_Q", "at_bound", "beta", "sampled"), "sum"),
    **dict.fromkeys(("state_square", "state_rows"), "sum"),
    "tile_decay": "max",
    # The running sum after a sublayer; attention residuals; softmax attention where
    # QK-clip asks.
    "stream_square": "mean",
    "depth_weights": "mean",
    "max_logit_H": "max",
}


def reduction(name: str) -> str:
    """The rule of the statistic at the end of the path `name`.

    Raises:
      ValueError: it is not in the table.
    """
    kind = name.rsplit("/", 1)[-1]
    if kind not in REDUCTIONS:
        raise ValueError(
            f"statistic {name!r} has no reduction; add {kind!r} to REDUCTIONS in "
            "kimi_jax/modules/statistics.py"
        )
    return REDUCTIONS[kind]


def partition(
    stats: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(those that may be summed as they come, those that have to be listed first)."""
    summed = {k: x for k, x in stats.items() if reduction(k) in ("sum", "mean")}
    return summed, {k: x for k, x in stats.items() if k not in summed}


def combine(
    summed: Mapping[str, jax.Array],
    listed: Mapping[str, jax.Array],
    tokens: jax.Array,
) -> dict[str, jax.Array]:
    """The statistics of a step.

    Args:
      summed: statistics that add up, summed over the micro-batches.
      listed: the others, stacked over the micro-batches on a leading axis.
      tokens: tokens of the step that are not padding, at least 1.
    """
    combined = {
        name: x / tokens if reduction(name) == "mean" else x
        for name, x in summed.items()
    }
    for name, x in listed.items():
        if reduction(name) == "max":
            combined[name] = jnp.max(x, axis=0)
        else:  # [micro-batches, ..., N, E] -> [..., micro-batches N, E]
            combined[name] = jnp.concatenate(list(x), axis=-2)
    return combined


def is_monitored(name: str) -> bool:
    """Whether a statistic leaves the step."""
    return name.rsplit("/", 1)[-1] not in _OBSERVED
