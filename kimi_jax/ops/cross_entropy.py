"""Cross-entropy and log-probabilities over token chunks: the [B, T, W] logits are
never whole in memory.

Logits of one chunk are made, reduced and dropped. Under differentiation the same
scan also takes that chunk's gradient, so logits are made once in all, rather than
again in the backward pass; what is kept until then is one gradient of h and one of
w. Log-probabilities, whose gradient depends on what is made of them, make the logits
again in the backward pass. A chunk takes every n-th token of every row, so rows and
time that are split over devices stay evenly split inside every chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def chunked_cross_entropy(
    h_BTD: Array,
    w_DW: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    chunk_size: int,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Weighted sum of -log softmax(h w)[target], in nats, and each token's own loss.

    Matmuls run in h's dtype and accumulate in float32 or wider, as does the gradient
    of w. Reverse-mode differentiation only.

    Args:
      h_BTD: [B, T, D] final hidden states.
      w_DW: [D, W] output embedding; cast to h's dtype for the matmuls.
      targets_BT: int [B, T] in [0, W). A target outside makes its loss NaN, except
        where the weight is 0.
      weights_BT: [B, T], 0 for tokens that do not count. Differentiable.
      chunk_size: most tokens whose logits exist at once, but at least one of every
        row; no loop when all B * T fit.
      z_loss: coefficient of the squared log-partition, a Python number.

    Returns:
      loss_sum: scalar, sum(weights * (loss + z_loss * logsumexp^2)).
      losses_BT: without weights and z-loss, 0 for a target outside [0, W) of weight
        0. No gradient flows through it. Both in float32 or wider.

    Raises:
      ValueError: shapes do not match, targets are not integers, or chunk_size < 1.
    """
    _check(h_BTD, w_DW, targets_BT, weights_BT, chunk_size)
    n = _chunks(h_BTD, chunk_size)
    weights_BT = weights_BT.astype(_wide(h_BTD))
    loss_sum, losses_BT = _loss(h_BTD, w_DW, targets_BT, weights_BT, n, float(z_loss))
    return loss_sum, lax.stop_gradient(losses_BT)


def chunked_logprobs(
    h_BTD: Array, w_DW: Array, targets_BT: Array, *, chunk_size: int
) -> tuple[Array, Array]:
    """log softmax(h w)[target] of each token, and the entropy of each softmax; nats.

    Both are differentiable by h and w, in reverse mode only; dtypes as in
    `chunked_cross_entropy`.

    Args:
      h_BTD, w_DW, chunk_size: as in `chunked_cross_entropy`.
      targets_BT: int [B, T] in [0, W); a target outside gives NaN.

    Returns:
      logprob_BT, entropy_BT in float32 or wider.

    Raises:
      ValueError: as `chunked_cross_entropy`.
    """
    _check(h_BTD, w_DW, targets_BT, targets_BT, chunk_size)
    return _logprobs(h_BTD, w_DW, targets_BT, _chunks(h_BTD, chunk_size))


def chunked_predictions(h_BTD: Array, w_DW: Array, *, chunk_size: int) -> Array:
    """The likeliest token at every position, int32 [B, T]; of equals the first.

    Args:
      h_BTD, w_DW, chunk_size: as in `chunked_cross_entropy`.
    """
    w_DW = w_DW.astype(h_BTD.dtype)

    def chunk(_, tokens):
        return None, jnp.argmax(_logits(tokens[0], w_DW), axis=-1).astype(jnp.int32)

    return _over_chunks(chunk, None, (h_BTD,), _chunks(h_BTD, chunk_size))[1]


def cross_entropy_reference(
    h_BTD: Array,
    w_DW: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """The same pair with the logits whole; targets must lie in [0, W)."""
    dtype = _wide(h_BTD)
    logits_BTW = h_BTD.astype(dtype) @ w_DW.astype(dtype)
    log_p_BTW = jax.nn.log_softmax(logits_BTW, axis=-1)
    losses_BT = -jnp.take_along_axis(log_p_BTW, targets_BT[..., None], axis=-1)[..., 0]
    lse_BT = jax.nn.logsumexp(logits_BTW, axis=-1)
    return jnp.sum(weights_BT * (losses_BT + z_loss * lse_BT**2)), losses_BT


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(h_BTD, w_DW, targets_BT, weights_BT, n, z_loss):
    w_DW = w_DW.astype(h_BTD.dtype)

    def chunk(_, tokens):
        logits_BTW = _logits(tokens[0], w_DW)
        _, targets, weights = tokens
        return None, _losses(logits_BTW, targets, weights, z_loss)[:2]

    _, per_token = _over_chunks(chunk, None, (h_BTD, targets_BT, weights_BT), n)
    losses_BT, penalised_BT = per_token
    return jnp.sum(weights_BT * penalised_BT), losses_BT


def _loss_fwd(h_BTD, w_DW, targets_BT, weights_BT, n, z_loss):
    w = w_DW.astype(h_BTD.dtype)

    def chunk(dw_DW, tokens):
        h, targets, weights = tokens
        logits_BTW = _logits(h, w)
        losses, penalised, lse = _losses(logits_BTW, targets, weights, z_loss)
        p_BTW = jnp.exp(logits_BTW - lse[..., None])
        dlogits_BTW = (1 + 2 * z_loss * lse[..., None]) * p_BTW - _one_hot(
            targets, p_BTW
        )
        dh_BTD, dw = _pull(h, w, weights[..., None] * dlogits_BTW)
        return dw if dw_DW is None else dw_DW + dw, (losses, penalised, dh_BTD)

    dw_DW = jnp.zeros(w_DW.shape, weights_BT.dtype) if n > 1 else None
    tokens = h_BTD, targets_BT, weights_BT
    dw_DW, (losses_BT, penalised_BT, dh_BTD) = _over_chunks(chunk, dw_DW, tokens, n)
    # A zero-sized array carries w's dtype to the backward pass without keeping w.
    saved = dh_BTD, dw_DW, penalised_BT, jnp.zeros((0,), w_DW.dtype)
    return (jnp.sum(weights_BT * penalised_BT), losses_BT), saved


def _loss_bwd(n, z_loss, saved, cotangents):
    dh_BTD, dw_DW, penalised_BT, like_w = saved
    dloss = cotangents[0]
    dh_BTD = (dloss * dh_BTD).astype(dh_BTD.dtype)
    return dh_BTD, (dloss * dw_DW).astype(like_w.dtype), None, dloss * penalised_BT


_loss.defvjp(_loss_fwd, _loss_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logprobs(h_BTD, w_DW, targets_BT, n):
    w_DW = w_DW.astype(h_BTD.dtype)

    def chunk(_, tokens):
        h, targets = tokens
        logits_BTW = _logits(h, w_DW)
        losses_BT, _, lse_BT = _losses(logits_BTW, targets, 1, 0.0)
        return None, (-losses_BT, _entropy(logits_BTW - lse_BT[..., None]))

    return _over_chunks(chunk, None, (h_BTD, targets_BT), n)[1]


def _logprobs_fwd(h_BTD, w_DW, targets_BT, n):
    saved = h_BTD, w_DW, targets_BT
    return _logprobs(*saved, n), saved


def _logprobs_bwd(n, saved, cotangents):
    h_BTD, w_DW, targets_BT = saved
    w = w_DW.astype(h_BTD.dtype)

    def chunk(dw_DW, tokens):
        h, targets, *cotangents = tokens
        dlogprob, dentropy = (x[..., None] for x in cotangents)
        log_p_BTW = jax.nn.log_softmax(_logits(h, w), axis=-1)
        p_BTW = jnp.exp(log_p_BTW)
        dlogits_BTW = dlogprob * (_one_hot(targets, p_BTW) - p_BTW)
        entropy = _entropy(log_p_BTW)[..., None]
        dlogits_BTW -= dentropy * p_BTW * (log_p_BTW + entropy)
        dh, dw = _pull(h, w, dlogits_BTW)
        return dw if dw_DW is None else dw_DW + dw, dh

    dw_DW = jnp.zeros(w_DW.shape, _wide(h_BTD)) if n > 1 else None
    tokens = h_BTD, targets_BT, *cotangents
    dw_DW, dh_BTD = _over_chunks(chunk, dw_DW, tokens, n)
    return dh_BTD, dw_DW.astype(w_DW.dtype), None


_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd)


def _entropy(log_p_BTW):
    return -jnp.sum(jnp.exp(log_p_BTW) * log_p_BTW, axis=-1)


def _pull(h_BTD, w_DW, dlogits_BTW):
    """Gradients of h, in its dtype, and of w, wide, from those of h w."""
    dlogits_BTW = dlogits_BTW.astype(h_BTD.dtype)
    dh_BTD = _matmul("btw,dw->btd", dlogits_BTW, w_DW).astype(h_BTD.dtype)
    return dh_BTD, _matmul("btd,btw->dw", h_BTD, dlogits_BTW)


def _chunks(h_BTD, chunk_size):
    B, T, _ = h_BTD.shape
    return max(min(-(-B * T // chunk_size), T), 1)


def _logits(h_BTD, w_DW):
    return _matmul("btd,dw->btw", h_BTD, w_DW)


def _losses(logits_BTW, targets_BT, weights_BT, z_loss):
    """Loss, loss with z-loss, and log-partition of each token."""
    W = logits_BTW.shape[-1]
    lse_BT = jax.nn.logsumexp(logits_BTW, axis=-1)
    # A comparison rather than a gather: it fuses, and W may be sharded.
    picked_BT = jnp.sum(
        jnp.where(_one_hot(targets_BT, logits_BTW), logits_BTW, 0), axis=-1
    )
    outside = jnp.where(weights_BT == 0, 0, jnp.nan)
    losses_BT = jnp.where(
        (targets_BT >= 0) & (targets_BT < W), lse_BT - picked_BT, outside
    )
    return losses_BT, losses_BT + z_loss * lse_BT**2, lse_BT


def _one_hot(targets_BT, logits_BTW):
    return targets_BT[..., None] == jnp.arange(logits_BTW.shape[-1])


def _over_chunks(body, carry, tokens, n):
    """Scans `body` over n chunks; token t is in chunk t mod n. Padding has weight 0."""
    if n == 1:
        return body(carry, tokens)
    B, T = tokens[0].shape[:2]

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, -T % n)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, n, *x.shape[2:]), 2, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 2).reshape(B, -1, *x.shape[3:])[:, :T]

    carry, per_token = lax.scan(body, carry, jax.tree.map(split, tokens))
    return carry, jax.tree.map(join, per_token)


def _matmul(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=_wide(a))


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _check(h_BTD, w_DW, targets_BT, weights_BT, chunk_size):
    shapes = f"h {h_BTD.shape}, w {w_DW.shape}, targets {targets_BT.shape}, "
    shapes += f"weights {weights_BT.shape}"
    ok = h_BTD.ndim == 3 and w_DW.ndim == 2 and h_BTD.shape[2] == w_DW.shape[0]
    if not ok or not targets_BT.shape == weights_BT.shape == h_BTD.shape[:2]:
        raise ValueError(
            f"cross-entropy got {shapes}, expected h [B, T, D], w [D, W], targets "
            "[B, T], weights [B, T]"
        )
    if not jnp.issubdtype(targets_BT.dtype, jnp.integer):
        raise ValueError(
            f"targets have dtype {targets_BT.dtype}, expected an integer type; pass "
            "token ids"
        )
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size}, expected >= 1; pass B * T for a single chunk"
        )
