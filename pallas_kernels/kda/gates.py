"""Element-wise preparation of the KDA inputs: norms, decay gate, write strength.

Every implementation of KDA starts from the same five prepared tensors. Keeping their
maths in one differentiable function lets the chunked path call `jax.vjp` on it in the
backward pass, so that normalised or activated copies are never saved.
Sources: Kimi K3 report, Eq. 5 (bounded gate); Kimi Linear report, Eq. 6-9 (softplus
gate, normalised keys).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Options(NamedTuple):
    """Static, hashable settings of one KDA call (see `pallas_kernels.kda.kda`)."""

    scale: float
    lower_bound: float | None
    use_gate_in_kernel: bool
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    chunk_size: int = 64
    axis: str | None = None


class Inputs(NamedTuple):
    """The differentiable raw inputs of one KDA call.

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV]; A_log [HV] or None;
    dt_bias [HV*K] or None.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None
    dt_bias: Array | None


class Prepared(NamedTuple):
    """What the recurrence reads, in the accumulation dtype, all with HV heads.

    q (normalised and scaled), k, g (log decay, <= 0) [B,T,HV,K]; v [B,T,HV,V]; beta
    [B,T,HV].
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """Returns float32, or float64 if any of the arrays is float64."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def l2norm(x: Array) -> Array:
    """Returns x / sqrt(sum(x^2) + 1e-6) over the last axis; zero stays zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def log_decay(
    g_BTHK: Array,
    A_log_H: Array | None,
    dt_bias: Array | None,
    lower_bound: float | None,
) -> Array:
    """Turns gate logits into the natural log of the per-channel decay.

    Bounded (Kimi K3, Eq. 5): lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
    Unbounded (Kimi Linear): -exp(A_log) * softplus(g + dt_bias).

    Args:
      g_BTHK: logits [B,T,HV,K], float32 or float64.
      A_log_H: [HV], or None for zeros.
      dt_bias: [HV*K], or None for zeros.
      lower_bound: smallest log decay per token, or None for the unbounded gate.
    """
    if dt_bias is not None:
        g_BTHK = g_BTHK + dt_bias.astype(g_BTHK.dtype).reshape(g_BTHK.shape[-2:])
    slope_H1 = jnp.ones((), g_BTHK.dtype)
    if A_log_H is not None:
        slope_H1 = jnp.exp(A_log_H.astype(g_BTHK.dtype))[:, None]
    return gate(g_BTHK, slope_H1, lower_bound)


def gate(logits: Array, slope: Array, lower_bound: float | None) -> Array:
    """The log decay from logits with their bias, and exp(A_log); shapes broadcast."""
    if lower_bound is None:
        return -slope * jax.nn.softplus(logits)
    return lower_bound * jax.nn.sigmoid(slope * logits)


def write_strength(beta: Array, options: Options) -> Array:
    """Returns beta after the optional sigmoid, doubled if `allow_neg_eigval`."""
    if not options.use_beta_sigmoid:
        return beta
    beta = jax.nn.sigmoid(beta)
    return 2.0 * beta if options.allow_neg_eigval else beta


def prepare(
    inputs: Inputs, real_BT: Array | None, options: Options, dtype: jnp.dtype
) -> Prepared:
    """Applies norms, gate, sigmoid, scale, and makes padding tokens inert.

    Works on any number of leading axes (a single token has none for T). Inert means
    q = k = v = 0, g = 0, beta = 0: no read, no write, no decay. Selection happens
    before and after the activations, so NaN in padding reaches neither values nor
    gradients.

    Args:
      inputs: raw inputs.
      real_BT: bool, False for padding; None if every token is real.
      options: static settings.
      dtype: accumulation dtype.
    """
    heads = inputs.v.shape[-2]

    def select(x: Array) -> Array:
        if real_BT is None:
            return x
        mask = jnp.expand_dims(real_BT, tuple(range(real_BT.ndim, x.ndim)))
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    q, k, v, g, beta = (select(x).astype(dtype) for x in inputs[:5])
    if options.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    if options.use_gate_in_kernel:
        g = log_decay(g, inputs.A_log, inputs.dt_bias, options.lower_bound)
    beta = write_strength(beta, options)
    return Prepared(
        q=_expand_heads(q * options.scale, heads),
        k=_expand_heads(k, heads),
        v=v,
        g=select(g),
        beta=select(beta),
    )


def _expand_heads(x: Array, heads: int) -> Array:
    """Repeats each of H heads for its HV // H value heads: hv reads hv // (HV // H)."""
    return x if x.shape[-2] == heads else jnp.repeat(x, heads // x.shape[-2], axis=-2)
