"""Keeping expert loads even: Quantile Balancing and the methods it is compared with.

A method is two pure functions around one [E] state, zero at the start: the routing
bias, or for `quantile_threshold` the score thresholds. `observe` runs in the forward
pass and returns a dict of arrays; these are added up (`reduction` names the exception)
over micro-batches and devices, and `update` turns the total into the next state, once
per optimizer step. Evaluation calls neither.

Quantile Balancing (Kimi K3 report Eq. 13-14, App. C-D) gives expert e the bias at which
exactly its share q = tokens * A / E of the step's tokens would have chosen it: the
(A/E)-quantile over tokens of the bias that it needed, r = cutoff - score. The cutoff is
a biased score and the score is raw; biasing both would count the bias twice.

Letters: N tokens, E experts, A active slots per token, Q histogram bins.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.ops.routing import Routing

Observed = dict[str, jax.Array]


def observe(
    method: str,
    routing: Routing,
    scores_NE: jax.Array,
    state_E: jax.Array,
    *,
    bins: int = 1000,
    axes: tuple[str, ...] = (),
) -> Observed:
    """What `method` needs to know of one micro-batch. Padding is not counted.

    Args:
      method: a key of `METHODS`.
      routing: from `route_threshold` for quantile_threshold, else from `route_top_k`.
      scores_NE: the raw scores that were routed.
      state_E: the state that they were routed with.
      bins: Q, the resolution of the two histogram methods.
      axes: inside `jax.shard_map`, the mesh axes that tokens are split over. All sums
        then cover all of them; margins stay with their tokens.

    Returns:
      Always load_E (int32, tokens given to each expert) and tokens (int32 scalar);
      histogram_EQ (int32) for quantile and quantile_threshold; margin_NE (score -
      cutoff, -inf for padding) for quantile_exact; balance_loss (see `balance_loss`),
      times tokens, for aux_loss. Only balance_loss carries a gradient.

    Raises:
      ValueError: unknown method, or a routing of the other kind.
    """
    observe_more, _ = _look_up(method)
    if (routing.cutoff_N is None) != (method == "quantile_threshold"):
        raise ValueError(
            f"method={method!r} got the routing of the other router; use "
            "route_threshold with quantile_threshold and route_top_k with all others"
        )
    counted = {
        "load_E": _load(routing, scores_NE.shape[1]),
        "tokens": _tokens(routing),
        **observe_more(routing, scores_NE, state_E, bins),
    }
    observed = {
        key: _over(axes, x) if reduction(key) == "sum" else x
        for key, x in counted.items()
    }
    if method == "aux_loss":
        loss = balance_loss(scores_NE, routing, axes)
        observed["balance_loss"] = loss * observed["tokens"]
    return observed


def observed_names(method: str) -> tuple[str, ...]:
    """The keys of what `observe` returns."""
    return ("load_E", "tokens", *_MORE.get(method, ()))


def update(
    method: str,
    state_E: jax.Array,
    observed: Mapping[str, jax.Array],
    *,
    active: int,
    ema: float = 0.0,
    step: float = 1e-3,
    low: float = 0.25,
    high: float = 0.75,
) -> jax.Array:
    """The state for the next step, from what the whole step's batch observed.

    A step with no tokens leaves the state as it is, and so does A = E, where there is
    nothing to choose.

    Args:
      method: a key of `METHODS`.
      state_E: the state that the step was routed with.
      observed: observations of the step, reduced as `reduction` says.
      active: A, experts that a token should use (on average, for quantile_threshold).
      ema: share of the old state that the quantile methods keep; 0 keeps none.
      step: size of one move, for sign and load_quantile.
      low: load_quantile raises the bias of experts under this quantile of the loads.
      high: load_quantile lowers the bias of experts over this quantile of the loads.

    Raises:
      ValueError: unknown method, or an option out of range.
    """
    _, update_state = _look_up(method)
    experts = state_E.shape[0]
    if not 1 <= active <= experts:
        raise ValueError(f"active={active}: choose 1 <= active <= {experts}")
    if not 0 <= ema < 1:
        raise ValueError(f"ema={ema}: choose 0 <= ema < 1; 0 keeps no history")
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low={low}, high={high}: choose 0 <= low <= high <= 1")
    if active == experts:
        return state_E
    options = _Options(active, ema, step, low, high)
    new_E = update_state(state_E, observed, options).astype(state_E.dtype)
    return jnp.where(observed["tokens"] > 0, new_E, state_E)


def reduction(key: str) -> str:
    """How observations under `key` combine: 'sum', or 'concat' along the token axis.

    Only margin_NE concatenates; its token axis is the second from the end.
    """
    return "concat" if key == "margin_NE" else "sum"


def balance_loss(
    scores_NE: jax.Array, routing: Routing, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Auxiliary loss E * sum_e f_e P_e: 1 when even, E/A when A experts have it all.

    f_e is expert e's share of the used slots (a constant to the gradient) and P_e the
    mean over tokens of its score after dividing each token's scores by their sum.
    Padding enters neither; `axes` as in `observe`. Both are means, so the value does
    not grow with the number
    of tokens; of several micro-batches take the mean weighted by their tokens.
    """
    load_E = _over(axes, _load(routing, scores_NE.shape[1]))
    share_E = load_E / jnp.maximum(jnp.sum(load_E), 1)
    score_NE = scores_NE / (jnp.sum(scores_NE, axis=1, keepdims=True) + 1e-20)
    if routing.mask_N is not None:
        score_NE = jnp.where(routing.mask_N[:, None], score_NE, 0)
    tokens = jnp.maximum(_over(axes, _tokens(routing)), 1)
    mean_E = _over(axes, jnp.sum(score_NE, axis=0)) / tokens
    return load_E.shape[0] * jnp.sum(share_E.astype(mean_E.dtype) * mean_E)


def max_violation(load_E: jax.Array) -> jax.Array:
    """MaxVio: largest load over the mean load, minus 1; 0 is even. Any leading axes."""
    load_E = jnp.asarray(load_E, float)
    mean = jnp.mean(load_E, axis=-1)
    ratio = jnp.max(load_E, axis=-1) / jnp.where(mean > 0, mean, 1)
    return jnp.where(mean > 0, ratio - 1, 0)


def load_entropy(load_E: jax.Array) -> jax.Array:
    """Entropy of the loads over its maximum log E, in [0, 1]; 1 is even.

    Any leading axes. No load at all, and a single expert, count as even.
    """
    load_E = jnp.asarray(load_E, float)
    total = jnp.sum(load_E, axis=-1, keepdims=True)
    share_E = load_E / jnp.where(total > 0, total, 1)
    entropy = jnp.sum(jax.scipy.special.entr(share_E), axis=-1)
    even = (total[..., 0] == 0) | (load_E.shape[-1] == 1)
    return jnp.where(even, 1, entropy / jnp.log(max(load_E.shape[-1], 2)))


class _Options(NamedTuple):
    active: int
    ema: float
    step: float
    low: float
    high: float


def _observe_nothing(routing, scores_NE, state_E, bins):
    return {}


def _observe_needed_bias(routing, scores_NE, bias_E, bins):
    needed_NE = routing.cutoff_N[:, None] - scores_NE
    return {"histogram_EQ": _histogram(needed_NE, *_range(bias_E), bins, routing)}


def _observe_margin(routing, scores_NE, state_E, bins):
    margin_NE = lax.stop_gradient(scores_NE - routing.cutoff_N[:, None])
    if routing.mask_N is not None:
        margin_NE = jnp.where(routing.mask_N[:, None], margin_NE, -jnp.inf)
    return {"margin_NE": margin_NE}


def _observe_distance_from_one(routing, scores_NE, state_E, bins):
    return {"histogram_EQ": _histogram(1 - scores_NE, 0, 1, bins, routing)}


def _update_nothing(state_E, observed, options):
    return state_E


def _update_quantile(bias_E, observed, options):
    new_E = _histogram_quantile(observed, *_range(bias_E), options.active)
    return _centre(_blend(bias_E, new_E, options.ema))


def _update_quantile_exact(bias_E, observed, options):
    margin_NE = jnp.sort(observed["margin_NE"], axis=0)
    whole, _ = _share(observed["tokens"], options.active, bias_E.shape[0])
    # The (q + 1)-th largest margin: at that bias only q tokens want the expert.
    row = jnp.maximum(margin_NE.shape[0] - 1 - whole, 0)
    new_E = -lax.dynamic_index_in_dim(margin_NE, row, keepdims=False)
    return _centre(_blend(bias_E, new_E, options.ema))


def _update_threshold(threshold_E, observed, options):
    # The (1 - A/E)-quantile of the scores, measured from their upper end.
    new_E = 1 - _histogram_quantile(observed, 0, 1, options.active)
    return _blend(threshold_E, new_E, options.ema)


def _update_load_quantile(bias_E, observed, options):
    load_E = observed["load_E"].astype(float)
    low, high = jnp.quantile(load_E, jnp.array([options.low, options.high]))
    move_E = (load_E < low).astype(bias_E.dtype) - (load_E > high)
    return bias_E + options.step * move_E


def _update_sign(bias_E, observed, options):
    load_E = observed["load_E"].astype(float)
    return bias_E + options.step * jnp.sign(jnp.mean(load_E) - load_E)


METHODS: dict[str, tuple[Callable, Callable]] = {
    "quantile": (_observe_needed_bias, _update_quantile),
    "quantile_exact": (_observe_margin, _update_quantile_exact),
    # Zero thresholds let every score pass, so the first step is plain top-cap.
    "quantile_threshold": (_observe_distance_from_one, _update_threshold),
    "load_quantile": (_observe_nothing, _update_load_quantile),
    "sign": (_observe_nothing, _update_sign),
    "aux_loss": (_observe_nothing, _update_nothing),
    "none": (_observe_nothing, _update_nothing),
}


_MORE = {
    "quantile": ("histogram_EQ",),
    "quantile_exact": ("margin_NE",),
    "quantile_threshold": ("histogram_EQ",),
    "aux_loss": ("balance_loss",),
}


def _over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _look_up(method: str) -> tuple[Callable, Callable]:
    if method not in METHODS:
        raise ValueError(
            f"unknown balancing method {method!r}; choose one of {', '.join(METHODS)}"
        )
    return METHODS[method]


def _tokens(routing):
    if routing.mask_N is None:
        return jnp.asarray(routing.experts_NA.shape[0], jnp.int32)
    return jnp.sum(routing.mask_N, dtype=jnp.int32)


def _load(routing, experts):
    return _count(routing.experts_NA.reshape(1, -1), experts)[0]


def _range(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds of cutoff - score: the cutoff is a score in (0, 1) plus some bias."""
    return jnp.min(bias_E) - 1, jnp.max(bias_E) + 1


def _histogram(value_NE, low, high, bins, routing):
    """int32 [E, Q] counts over tokens that are not padding."""
    position_NE = lax.stop_gradient((value_NE - low) * (bins / (high - low)))
    bin_NE = jnp.clip(position_NE, 0, bins - 1).astype(jnp.int32)
    if routing.mask_N is not None:
        bin_NE = jnp.where(routing.mask_N[:, None], bin_NE, bins)
    return _count(bin_NE.T, bins)


def _count(index_GM, size):
    """int32 [G, size] occurrences of each index in each row; index `size` is dropped.

    A scatter-add is the fastest form on CPU and GPU. A TPU scatters element by element,
    but counts as quickly as it multiplies matrices.
    """
    return lax.platform_dependent(
        index_GM,
        tpu=lambda index_GM: _count_by_matmul(index_GM, size),
        default=lambda index_GM: _count_by_scatter(index_GM, size),
    )


def _count_by_scatter(index_GM, size):
    zeros = jnp.zeros((index_GM.shape[0], size), jnp.int32)
    row_G1 = jnp.arange(index_GM.shape[0])[:, None]
    return zeros.at[row_G1, index_GM].add(1, mode="drop")


def _count_by_matmul(index_GM, size):
    """Counts (index // 32, index % 32) pairs as a product of two one-hot matrices.

    Exact while a count is below 2**24, where float32 stops holding every integer.
    """
    high_GMi = jax.nn.one_hot(index_GM // 32, -(-size // 32), dtype=jnp.bfloat16)
    low_GMj = jax.nn.one_hot(index_GM % 32, 32, dtype=jnp.bfloat16)
    count_Gij = jnp.einsum(
        "gmi,gmj->gij", high_GMi, low_GMj, preferred_element_type=jnp.float32
    )
    return count_Gij.reshape(index_GM.shape[0], -1)[:, :size].astype(jnp.int32)


def _histogram_quantile(observed, low, high, active):
    """The (A/E)-quantile of each row, linear inside its bin (Kimi K3 report App. D)."""
    count_EQ = observed["histogram_EQ"]
    experts, bins = count_EQ.shape
    whole, part = _share(observed["tokens"], active, experts)
    up_to_EQ = jnp.cumsum(count_EQ, axis=1)
    # argmax finds the first bin whose cumulative count reaches ceil(q).
    bin_E1 = jnp.argmax(up_to_EQ >= whole + (part > 0), axis=1, keepdims=True)
    inside_E = jnp.take_along_axis(count_EQ, bin_E1, axis=1)[:, 0]
    before_E = jnp.take_along_axis(up_to_EQ, bin_E1, axis=1)[:, 0] - inside_E
    fraction_E = ((whole - before_E) + part) / jnp.maximum(inside_E, 1)
    position_E = bin_E1[:, 0] + jnp.clip(fraction_E, 0, 1)
    return low + position_E * ((high - low) / bins)


def _share(tokens, active, experts):
    """q = tokens * A / E as (whole, fraction), without overflow of int32."""
    rest = tokens % experts * active
    whole = tokens // experts * active + rest // experts
    return whole, rest % experts / experts


def _blend(old_E, new_E, ema):
    return ema * old_E + (1 - ema) * new_E


def _centre(bias_E):
    """Adding a constant to every bias changes no choice, so keep the mean at zero."""
    return bias_E - jnp.mean(bias_E)
