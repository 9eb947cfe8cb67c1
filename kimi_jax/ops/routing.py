"""Which experts a token uses, and with what weights.

The router of Kimi K3 scores every expert with a sigmoid, independently of the
others. A per-expert bias is added for the choice only; the mixing weights come from
the unbiased scores (Kimi K3 report, Eq. 11 and Sec. on Quantile Balancing). The bias
belongs to `kimi_jax.ops.balancing`, which also says what is kept from each routing.

An expert index equal to E, the number of experts, means "no expert" everywhere in
this package: padding tokens and unused slots carry it, always with weight 0.

Letters: N tokens, D router input width, E experts, A active slots per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """The choice made for each token, with what balancing needs to observe it.

    Attributes:
      experts_NA: int32 expert of each slot, in [0, E]; E = no expert.
      weights_NA: mixing weight of each slot, in the dtype of the scores.
      cutoff_N: the best biased score that was not chosen (alpha in Kimi K3 report,
        Eq. 13); -inf if every expert was chosen. None for `route_threshold`.
      mask_N: bool, False for padding tokens; None = no padding.
      refused_N: int32, experts that each token wanted and got no slot for; None where
        no token can want more than it gets.
    """

    experts_NA: jax.Array
    weights_NA: jax.Array
    cutoff_N: jax.Array | None
    mask_N: jax.Array | None
    refused_N: jax.Array | None = None


def router_scores(x_ND: jax.Array, w_DE: jax.Array) -> jax.Array:
    """Sigmoid score of every expert, in (0, 1).

    The logits are computed in float32 (float64 for float64 inputs) at the highest
    matmul precision: a choice between near-equal scores must not depend on the
    matmul unit's rounding.

    Returns:
      s_NE, float32 or float64.
    """
    if x_ND.ndim != 2 or w_DE.ndim != 2 or x_ND.shape[1] != w_DE.shape[0]:
        raise ValueError(
            f"router_scores needs x [N, D] and w [D, E], got {x_ND.shape} and "
            f"{w_DE.shape}; flatten the tokens and check the router width"
        )
    dtype = jnp.promote_types(jnp.result_type(x_ND, w_DE), jnp.float32)
    logits_NE = jnp.einsum(
        "nd,de->ne",
        x_ND.astype(dtype),
        w_DE.astype(dtype),
        precision=lax.Precision.HIGHEST,
    )
    return jax.nn.sigmoid(logits_NE)


def route_top_k(
    scores_NE: jax.Array,
    bias_E: jax.Array,
    *,
    active: int,
    scale: float,
    renormalize: bool = True,
    mask_N: jax.Array | None = None,
) -> Routing:
    """Gives each token the `active` experts of largest score + bias.

    Ties go to the lower expert index. Neither the weights nor any gradient depend on
    the bias, other than through the choice itself.

    Args:
      scores_NE: scores from `router_scores`.
      bias_E: balancing bias.
      active: A, experts per token, 1 <= A <= E.
      scale: factor on the weights (`routed_scaling_factor`).
      renormalize: divide the chosen scores by their sum.
      mask_N: bool, False for padding tokens, which get no expert.

    Raises:
      ValueError: `active` is out of range, or shapes do not match.
    """
    experts = _check(scores_NE, bias_E, mask_N, "active", active)
    biased_NE = lax.stop_gradient(scores_NE + bias_E.astype(scores_NE.dtype))
    # Without the barriers XLA:CPU merges the slices below into top_k and then sorts
    # whole rows, 20 times as slow with 896 experts. One barrier for each: XLA crashes
    # in shard_map on a barrier over both.
    best, index = map(
        lax.optimization_barrier, lax.top_k(biased_NE, min(active + 1, experts))
    )
    if active < experts:
        cutoff_N = best[:, active]
    else:
        cutoff_N = jnp.full_like(best[:, 0], -jnp.inf)
    used_NA = None if mask_N is None else mask_N[:, None]
    experts_NA, weights_NA = _weigh(
        scores_NE, index[:, :active], used_NA, scale, renormalize
    )
    return Routing(experts_NA, weights_NA, cutoff_N, mask_N)


def route_threshold(
    scores_NE: jax.Array,
    threshold_E: jax.Array,
    *,
    cap: int,
    scale: float,
    renormalize: bool = True,
    mask_N: jax.Array | None = None,
) -> Routing:
    """Gives each token every expert whose score is over that expert's threshold.

    The baseline `quantile_threshold`: the number of experts varies by token, up to
    `cap`, and the largest margins (score - threshold) win. Slots left over have no
    expert; a token over no threshold gets no expert at all, so that its routed output
    is exactly zero.

    Args:
      scores_NE: scores from `router_scores`.
      threshold_E: thresholds, from `balancing.update`.
      cap: slots per token, 1 <= cap <= E.
      scale: factor on the weights.
      renormalize: divide the chosen scores by their sum.
      mask_N: bool, False for padding tokens, which get no expert.

    Raises:
      ValueError: `cap` is out of range, or shapes do not match.
    """
    _check(scores_NE, threshold_E, mask_N, "cap", cap)
    margin_NE = lax.stop_gradient(scores_NE - threshold_E.astype(scores_NE.dtype))
    margin_NA, index_NA = lax.top_k(margin_NE, cap)
    used_NA = margin_NA > 0
    if mask_N is not None:
        used_NA &= mask_N[:, None]
    experts_NA, weights_NA = _weigh(scores_NE, index_NA, used_NA, scale, renormalize)
    refused_N = jnp.maximum(jnp.sum(margin_NE > 0, axis=1, dtype=jnp.int32) - cap, 0)
    return Routing(experts_NA, weights_NA, None, mask_N, refused_N)


def replay(
    routing: Routing,
    scores_NE: jax.Array,
    experts_NA: jax.Array,
    *,
    scale: float,
    renormalize: bool = True,
) -> Routing:
    """`routing` with the choice made elsewhere, weighed by the scores of here.

    What balancing observes of the router's own wishes stays: the cutoff is that of the
    free choice, so the bias that an expert would have needed is well defined; the loads
    are those of the experts that work.

    Args:
      routing: the free choice, for tokens that have nothing to replay.
      scores_NE: scores from `router_scores`; gradients reach those of the replayed
        experts.
      experts_NA: int, experts of each slot; E = none. A token with none at all is not
        replayed.
      scale, renormalize: as in `route_top_k`.

    Raises:
      ValueError: the shapes differ.
    """
    if experts_NA.shape != routing.experts_NA.shape:
        raise ValueError(
            f"the experts to replay have shape {experts_NA.shape}, the router chooses "
            f"{routing.experts_NA.shape}; record them with the same model"
        )
    E = scores_NE.shape[1]
    experts_NA = experts_NA.astype(jnp.int32)
    given_N1 = replayed(routing, experts_NA, E)[:, None]
    experts_NA = jnp.where(given_N1, experts_NA, routing.experts_NA)
    index_NA = jnp.clip(experts_NA, 0, E - 1)
    experts_NA, weights_NA = _weigh(
        scores_NE, index_NA, index_NA == experts_NA, scale, renormalize
    )
    refused_N = routing.refused_N
    if refused_N is not None:
        refused_N = jnp.where(given_N1[:, 0], 0, refused_N)
    return routing._replace(
        experts_NA=experts_NA, weights_NA=weights_NA, refused_N=refused_N
    )


def replayed(routing: Routing, experts_NA: jax.Array, num_experts: int) -> jax.Array:
    """Which tokens `replay` gives the experts of elsewhere, bool [N]."""
    given_N = jnp.any(experts_NA < num_experts, axis=1)
    return given_N if routing.mask_N is None else given_N & routing.mask_N


def agreement(
    routing: Routing, experts_NA: jax.Array, num_experts: int
) -> dict[str, jax.Array]:
    """How much of a choice made elsewhere the free choice `routing` shares.

    Returns:
      int32 scalars over the tokens that `replay` would replay: replayed_slots, and
      agreed_slots of them, whose expert is among the token's own, in whatever order.
    """
    used_NA = experts_NA < num_experts
    used_NA &= replayed(routing, experts_NA, num_experts)[:, None]
    same_NAA = experts_NA[:, :, None] == routing.experts_NA[:, None, :]
    return {
        "replayed_slots": jnp.sum(used_NA, dtype=jnp.int32),
        "agreed_slots": jnp.sum(used_NA & jnp.any(same_NAA, -1), dtype=jnp.int32),
    }


def dropped(routing: Routing, num_experts: int) -> dict[str, jax.Array]:
    """What a routing left undone, as int32 scalars; padding is not counted.

    Returns:
      dropped_slots, the pairs of a token and an expert that it wanted but got no slot
      for; unrouted_tokens, the tokens without any expert.
    """
    tokens = routing.experts_NA.shape[0]
    zeros_N = jnp.zeros(tokens, jnp.int32)
    refused_N = zeros_N if routing.refused_N is None else routing.refused_N
    bare_N = jnp.all(routing.experts_NA == num_experts, axis=1)
    if routing.mask_N is not None:
        refused_N = jnp.where(routing.mask_N, refused_N, 0)
        bare_N &= routing.mask_N
    return {
        "dropped_slots": jnp.sum(refused_N),
        "unrouted_tokens": jnp.sum(bare_N, dtype=jnp.int32),
    }


def _weigh(scores_NE, index_NA, used_NA, scale, renormalize):
    """Weights from unbiased scores; slots that are not used become (E, 0)."""
    index_NA = index_NA.astype(jnp.int32)
    weights_NA = jnp.take_along_axis(scores_NE, index_NA, axis=1)
    if used_NA is not None:
        index_NA = jnp.where(used_NA, index_NA, scores_NE.shape[1])
        weights_NA = jnp.where(used_NA, weights_NA, 0)
    if renormalize:
        total_N1 = jnp.sum(weights_NA, axis=1, keepdims=True) + 1e-20
        if used_NA is not None:
            # The derivative of 0 / 1e-20 overflows float32; unused rows divide by 1.
            some_N1 = jnp.any(used_NA, axis=1, keepdims=True)
            total_N1 = jnp.where(some_N1, total_N1, 1)
        weights_NA = weights_NA / total_N1
    return index_NA, weights_NA * scale


def _check(scores_NE, state_E, mask_N, name, slots) -> int:
    if scores_NE.ndim != 2:
        raise ValueError(
            f"scores must be [N, E], got {scores_NE.shape}; flatten tokens"
        )
    tokens, experts = scores_NE.shape
    if state_E.shape != (experts,):
        raise ValueError(
            f"the balancing state has shape {state_E.shape}, the scores have {experts} "
            f"experts; use an array of shape ({experts},)"
        )
    if mask_N is not None and (mask_N.shape != (tokens,) or mask_N.dtype != bool):
        raise ValueError(
            f"mask must be bool [{tokens}], got {mask_N.dtype} {mask_N.shape}; "
            "use e.g. segment_ids.reshape(-1) > 0"
        )
    if not 1 <= slots <= experts:
        raise ValueError(
            f"{name}={slots} with {experts} experts; choose 1 <= {name} <= {experts}"
        )
    return experts
