"""Cross-entropy over token chunks: the [N, W] logits are never whole in memory.

Logits of one chunk are made, reduced and dropped. Under differentiation the same
scan also takes that chunk's gradient, so logits are made once in all, rather than
again in the backward pass; what is kept until then is one gradient of h and one of
w. Chunks are strided over the tokens, so a token axis that is sharded stays evenly
sharded inside every chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def chunked_cross_entropy(
    h_ND: Array,
    w_DW: Array,
    targets_N: Array,
    weights_N: Array,
    *,
    chunk_size: int,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Weighted sum of -log softmax(h w)[target], in nats, and each token's own loss.

    Matmuls run in h's dtype and accumulate in float32 or wider, as does the gradient
    of w. Reverse-mode differentiation only.

    Args:
      h_ND: [N, D] final hidden states of N tokens.
      w_DW: [D, W] output embedding; cast to h's dtype for the matmuls.
      targets_N: int [N] in [0, W). A target outside makes its loss NaN, except where
        the weight is 0.
      weights_N: [N], 0 for tokens that do not count. Differentiable.
      chunk_size: most tokens whose logits exist at once; no loop when N fits.
      z_loss: coefficient of the squared log-partition, a Python number.

    Returns:
      loss_sum: scalar, sum(weights * (loss + z_loss * logsumexp^2)).
      losses_N: [N], without weights and z-loss, 0 for a target outside [0, W) of
        weight 0. No gradient flows through it. Both in float32 or wider.

    Raises:
      ValueError: shapes do not match, targets are not integers, or chunk_size < 1.
    """
    _check(h_ND, w_DW, targets_N, weights_N, chunk_size)
    n = -(-h_ND.shape[0] // chunk_size)
    weights_N = weights_N.astype(_wide(h_ND))
    loss_sum, losses_N = _loss(
        h_ND, w_DW, targets_N, weights_N, max(n, 1), float(z_loss)
    )
    return loss_sum, lax.stop_gradient(losses_N)


def cross_entropy_reference(
    h_ND: Array,
    w_DW: Array,
    targets_N: Array,
    weights_N: Array,
    *,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """The same pair with the logits whole; targets must lie in [0, W)."""
    dtype = _wide(h_ND)
    logits_NW = h_ND.astype(dtype) @ w_DW.astype(dtype)
    log_p_NW = jax.nn.log_softmax(logits_NW, axis=-1)
    losses_N = -jnp.take_along_axis(log_p_NW, targets_N[:, None], axis=-1)[:, 0]
    lse_N = jax.nn.logsumexp(logits_NW, axis=-1)
    return jnp.sum(weights_N * (losses_N + z_loss * lse_N**2)), losses_N


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(h_ND, w_DW, targets_N, weights_N, n, z_loss):
    w_DW = w_DW.astype(h_ND.dtype)

    def chunk(_, tokens):
        logits_NW = _logits(tokens[0], w_DW)
        _, targets, weights = tokens
        return None, _losses(logits_NW, targets, weights, z_loss)[:2]

    _, per_token = _over_chunks(chunk, None, (h_ND, targets_N, weights_N), n)
    losses_N, penalised_N = per_token
    return jnp.sum(weights_N * penalised_N), losses_N


def _loss_fwd(h_ND, w_DW, targets_N, weights_N, n, z_loss):
    w = w_DW.astype(h_ND.dtype)

    def chunk(dw_DW, tokens):
        h, targets, weights = tokens
        logits_NW = _logits(h, w)
        losses, penalised, lse = _losses(logits_NW, targets, weights, z_loss)
        p_NW = jnp.exp(logits_NW - lse[:, None])
        dlogits_NW = (1 + 2 * z_loss * lse[:, None]) * p_NW - _one_hot(targets, p_NW)
        dlogits_NW = (weights[:, None] * dlogits_NW).astype(h.dtype)
        dh_ND = _matmul("nw,dw->nd", dlogits_NW, w).astype(h.dtype)
        dw = _matmul("nd,nw->dw", h, dlogits_NW)
        return dw if dw_DW is None else dw_DW + dw, (losses, penalised, dh_ND)

    dw_DW = jnp.zeros(w_DW.shape, weights_N.dtype) if n > 1 else None
    tokens = h_ND, targets_N, weights_N
    dw_DW, (losses_N, penalised_N, dh_ND) = _over_chunks(chunk, dw_DW, tokens, n)
    # A zero-sized array carries w's dtype to the backward pass without keeping w.
    saved = dh_ND, dw_DW, penalised_N, jnp.zeros((0,), w_DW.dtype)
    return (jnp.sum(weights_N * penalised_N), losses_N), saved


def _loss_bwd(n, z_loss, saved, cotangents):
    dh_ND, dw_DW, penalised_N, like_w = saved
    dloss = cotangents[0]
    dh_ND = (dloss * dh_ND).astype(dh_ND.dtype)
    return dh_ND, (dloss * dw_DW).astype(like_w.dtype), None, dloss * penalised_N


_loss.defvjp(_loss_fwd, _loss_bwd)


def _logits(h_ND, w_DW):
    return _matmul("nd,dw->nw", h_ND, w_DW)


def _losses(logits_NW, targets_N, weights_N, z_loss):
    """Loss, loss with z-loss, and log-partition of each token."""
    W = logits_NW.shape[-1]
    lse_N = jax.nn.logsumexp(logits_NW, axis=-1)
    # A comparison rather than a gather: it fuses, and W may be sharded.
    picked_N = jnp.sum(jnp.where(_one_hot(targets_N, logits_NW), logits_NW, 0), axis=-1)
    outside = jnp.where(weights_N == 0, 0, jnp.nan)
    losses_N = jnp.where((targets_N >= 0) & (targets_N < W), lse_N - picked_N, outside)
    return losses_N, losses_N + z_loss * lse_N**2, lse_N


def _one_hot(targets_N, logits_NW):
    return targets_N[:, None] == jnp.arange(logits_NW.shape[-1])


def _over_chunks(body, carry, tokens, n):
    """Scans `body` over n chunks; token i is in chunk i mod n. Padding has weight 0."""
    if n == 1:
        return body(carry, tokens)
    N = tokens[0].shape[0]

    def split(x):
        x = jnp.pad(x, [(0, -N % n)] + [(0, 0)] * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(-1, n, *x.shape[1:]), 0, 1)

    def join(x):
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[:N]

    carry, per_token = lax.scan(body, carry, jax.tree.map(split, tokens))
    return carry, jax.tree.map(join, per_token)


def _matmul(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=_wide(a))


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _check(h_ND, w_DW, targets_N, weights_N, chunk_size):
    shapes = f"h {h_ND.shape}, w {w_DW.shape}, targets {targets_N.shape}, "
    shapes += f"weights {weights_N.shape}"
    ok = h_ND.ndim == w_DW.ndim == 2 and h_ND.shape[1] == w_DW.shape[0]
    if not ok or not targets_N.shape == weights_N.shape == h_ND.shape[:1]:
        raise ValueError(
            f"cross-entropy got {shapes}, expected h [N, D], w [D, W], targets [N], "
            "weights [N]; flatten batch and time into N"
        )
    if not jnp.issubdtype(targets_N.dtype, jnp.integer):
        raise ValueError(
            f"targets have dtype {targets_N.dtype}, expected an integer type; pass "
            "token ids"
        )
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size}, expected >= 1; pass N for a single chunk"
        )
