"""Chunked KDA in portable XLA, with its own backward pass.

Chunks are prepared all at once (`chunks.py`); a scan then carries only the state S:

    D = V - Kp S        X = A diag(beta) D        O = Qp S + P X
    S' = diag(gam) S + Kr^T X                     A = (I + diag(beta) M)^-1

Saved for the backward pass: the raw inputs, the state that enters each chunk, and the
C x C matrices M, P and A. Everything else is rebuilt. The way from the raw inputs to
the chunk tensors is differentiated by `jax.vjp`; only the scan is derived by hand. The
saved arrays are named "kda_states" and "kda_matrices" for remat policies.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kda.chunks import (
    Chunks,
    from_chunks,
    make_chunks,
    to_chunks,
    unit_lower_inverse,
)
from pallas_kernels.kda.gates import Inputs, Options, prepare
from pallas_kernels.kda.segments import Runs, chunk_masks

Array = jax.Array


class Residuals(NamedTuple):
    """What the backward pass needs.

    s [N,B,H,K,V]: the state that enters each chunk; m, p, a [N,B,H,C,C].
    """

    inputs: Inputs
    runs: Runs | None
    s: Array
    m: Array
    p: Array
    a: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def kda_xla(
    inputs: Inputs, initial_state_BHKV: Array, runs: Runs | None, options: Options
) -> tuple[Array, Array]:
    """Runs KDA over all tokens, `options.chunk_size` at a time.

    Args:
      inputs: raw inputs, at least one token.
      initial_state_BHKV: state [B,HV,K,V] in the accumulation dtype.
      runs: documents of each row, or None for one document per row.
      options: static settings.

    Returns:
      o [B,T,HV,V] and the final state, both in the accumulation dtype.
    """
    outputs, _ = _run(inputs, initial_state_BHKV, runs, options, save=False)
    return outputs


def _run(inputs, initial_state_BHKV, runs, options, save=True):
    """Returns ((o, final state), residuals); residuals are None unless `save`."""
    dot, dot_t, _ = _products(inputs)
    chunks = _prepare_chunks(inputs, runs, options, initial_state_BHKV.dtype)
    a = _inverse(chunks)

    def step(s, xs):
        v, beta, kp, qp, kr, gam, p, a = xs
        x = dot(a, beta[..., None] * (v - dot(kp, s)))
        o = dot(qp, s) + dot(p, x)
        return gam[..., None] * s + dot_t(kr, x), (o, s if save else None)

    v, beta, kp, qp, kr, gam, m, p = chunks
    xs = (v, beta, kp, qp, kr, gam, p, a)
    final_state, (o, s) = jax.lax.scan(step, initial_state_BHKV, xs)
    outputs = from_chunks(o, inputs.v.shape[1]), final_state
    if not save:
        return outputs, None
    s = checkpoint_name(s, "kda_states")
    m, p, a = (checkpoint_name(x, "kda_matrices") for x in (m, p, a))
    return outputs, Residuals(inputs, runs, s, m, p, a)


def _differentiate(options, saved, cotangents):
    """Backward pass; dx stands for the gradient of the loss by x, s' for the next s."""
    do_BTHV, dfinal_state = cotangents
    # Without the barrier XLA would keep the forward pass's chunk tensors instead of
    # rebuilding them here.
    inputs, runs, s, m, p, a = jax.lax.optimization_barrier(saved)
    dot, dot_t, dot_nt = _products(inputs)
    chunks, to_inputs = jax.vjp(
        lambda raw: _prepare_chunks(raw, runs, options, s.dtype), inputs
    )
    v, beta, kp, qp, kr, gam, _, _ = chunks
    if runs is not None:
        do_BTHV = jnp.where(runs.real_BT[:, :, None, None], do_BTHV, 0.0)
    do = to_chunks(do_BTHV, options.chunk_size)

    def step(ds_next, xs):
        beta, kp, kr, gam, a, dx_from_o, ds_from_o = xs
        dr = dot_t(a, dx_from_o + dot(kr, ds_next))
        ds = ds_from_o + gam[..., None] * ds_next - dot_t(kp, beta[..., None] * dr)
        return ds, (ds_next, dr)

    xs = (beta, kp, kr, gam, a, dot_t(p, do), dot_t(qp, do))
    dinitial_state, (ds_next, dr) = jax.lax.scan(step, dfinal_state, xs, reverse=True)

    d = v - dot(kp, s)
    x = dot(a, beta[..., None] * d)
    dv = beta[..., None] * dr
    dl = -dot_nt(dr, x)
    # L = diag(beta) M. Reading beta's share off M itself avoids dividing by beta.
    dbeta = jnp.sum(dr * d, axis=-1) + jnp.sum(dl * m, axis=-1)
    (dinputs,) = to_inputs(
        Chunks(
            v=dv,
            beta=dbeta,
            kp=-dot_nt(dv, s),
            qp=dot_nt(do, s),
            kr=dot_nt(x, ds_next),
            gam=jnp.sum(s * ds_next, axis=-1),
            m=beta[..., None] * dl,
            p=dot_nt(do, x),
        )
    )
    return dinputs, dinitial_state, None


kda_xla.defvjp(_run, _differentiate)


def _prepare_chunks(inputs, runs, options, dtype) -> Chunks:
    real_BT = None if runs is None else runs.real_BT
    masks = None if runs is None else chunk_masks(runs.run_BT, options.chunk_size)
    prepared = prepare(inputs, real_BT, options, dtype)
    bounded = options.lower_bound is not None
    return make_chunks(prepared, masks, options.chunk_size, bounded, _precision(inputs))


def _inverse(chunks: Chunks) -> Array:
    # Always in full precision: errors of the inverse enter every later token.
    lower = chunks.beta[..., None] * chunks.m
    return unit_lower_inverse(lower, jax.lax.Precision.HIGHEST)


def _precision(inputs: Inputs) -> jax.lax.Precision:
    """Lets accelerators round products of bfloat16 inputs, never those of float32."""
    if inputs.q.dtype == jnp.bfloat16:
        return jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGHEST


def _products(inputs: Inputs):
    """Returns a @ b, a^T @ b and a @ b^T over the last two axes."""
    precision = _precision(inputs)
    equations = "...ij,...jk->...ik", "...ji,...jk->...ik", "...ij,...kj->...ik"
    return [partial(jnp.einsum, x, precision=precision) for x in equations]
