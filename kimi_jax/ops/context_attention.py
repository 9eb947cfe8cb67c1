"""Softmax attention with time split over a mesh axis: only narrow latents travel.

Each rank keeps its queries and looks at its own piece of keys first, then at the pieces
of earlier ranks, nearest first, with one online softmax over all. A piece arrives as
latents and is expanded into keys and values where it is read. Two forms:

    gather   all latents are gathered; a rank reads the pieces that it needs.
    ring     pieces are passed from rank to rank; two are held at a time.

A device that walks through a row piece by piece reads the past in the same way: there
the earlier pieces are `held`, and no mesh axis is needed (`carried_attention`).

All read the same pieces in the same order. The backward pass fetches the latents again
and expands each piece again, from the saved log-sum-exp; what a rank adds to the
gradient of a piece returns to its owner (a reduce-scatter, or with the piece around
the ring). Axis letters as in `attention_blocks.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.attention import check_inputs
from kimi_jax.ops.attention_blocks import (
    Rows,
    block_and_padding,
    block_grads,
    blocks_of,
    finish,
    first_blocks,
    forward_blocks,
    heads,
    join,
    row_cotangents,
    rows_of,
)
from kimi_jax.ops.context import from_earlier, starts_relative, vary_like

# Latents as they travel, in bfloat16, and their gradient in float32.
_BYTES_PER_VALUE = 2 + 4

Expand = Callable[[Any, Any], tuple[Array, Array]]


class _Settings(NamedTuple):
    """Static; hashable as `jax.custom_vjp` demands."""

    expand: Expand
    axis: str | None  # None: earlier pieces are held
    scale: float
    block: int
    padding: int
    ring: bool


def choose_attention(
    length: int, width: int, *, batch: int = 1, limit_bytes: int = 2**30
) -> tuple[str, str]:
    """Says which form of `context_attention` to use, and why.

    Both move the same bytes and do the same work. `gather` has one collective, where
    `ring` has one per rank; but it holds the latents of all ranks, and in the backward
    pass their float32 gradient as well.

    Args:
      length: tokens of one row, over all ranks.
      width: latent values of a token, 576 in Kimi K3.
      batch: rows on one device.
      limit_bytes: memory that gathering may take.

    Returns:
      ("gather" or "ring", reason), the reason fit for a log line.
    """
    gathered = length * width * batch * _BYTES_PER_VALUE
    form = "gather" if gathered <= limit_bytes else "ring"
    reason = (
        f"the latents of {batch} x {length} tokens and their gradient take "
        f"{gathered / 2**20:.0f} MiB if gathered, and {limit_bytes / 2**20:.0f} MiB "
        "are allowed"
    )
    return form, reason


def context_attention(
    q_BTHK: Array,
    latents: Any,
    expand: Expand,
    parameters: Any = (),
    *,
    axis: str,
    form: str,
    scale: float,
    segment_ids_BT: Array | None = None,
    block_size: int = 512,
) -> Array:
    """`attention` over the past on all ranks, inside `jax.shard_map`.

    Args:
      q_BTHK: [B, T, H, K], this rank's T >= 1 queries.
      latents: array or pytree of arrays [B, T, ...] that hold all that the keys and
        values of this rank's tokens are made of (rotated already, with "rope").
      expand: expand(parameters, latents) -> k [B, T, G, K], v [B, T, G, V], token by
        token. Runs once per piece, and again in the backward pass.
      parameters: pytree of arrays, equal on all ranks; gets gradients.
      axis: name of the mesh axis, contiguous pieces of equal length, rank 0 first.
      form: "gather" or "ring", see `choose_attention`.
      scale, segment_ids_BT, block_size: as in `attention`, for this rank's tokens.

    Returns:
      [B, T, H, V] in float32 or wider, 0 at padding, whose inputs get no gradient.

    Raises:
      ValueError: what `attention` raises, or an unknown form.
    """
    options = (axis, form, scale, segment_ids_BT, block_size)
    return _attend_masked(q_BTHK, latents, expand, parameters, *options)[0]


def context_attention_with_max_logits(
    q_BTHK: Array,
    latents: Any,
    expand: Expand,
    parameters: Any = (),
    *,
    axis: str,
    form: str,
    scale: float,
    segment_ids_BT: Array | None = None,
    block_size: int = 512,
) -> tuple[Array, Array]:
    """`context_attention`, and the largest of the scaled scores of each head.

    Returns:
      The output, and max_logit_H over the batch and the ranks of `axis`, equal on all
      of them; as in `attention_with_max_logits`.
    """
    options = (axis, form, scale, segment_ids_BT, block_size)
    o, max_BTH = _attend_masked(q_BTHK, latents, expand, parameters, *options)
    max_H = jnp.max(lax.stop_gradient(max_BTH), axis=(0, 1))
    return o, lax.pmax(max_H, axis)


def carried_attention(
    q_BTHK: Array,
    latents: Any,
    past: Any,
    index: Array,
    expand: Expand,
    parameters: Any = (),
    *,
    start_BT: Array,
    scale: float,
    block_size: int = 512,
) -> tuple[Array, Array]:
    """`attention` of one piece of a row to itself and to the pieces before it.

    All but `index` and `start_BT` is differentiable, in reverse mode only. Time grows
    with the pieces that any row here looks at.

    Args:
      q_BTHK, latents, expand, parameters, scale, block_size: of this piece, as in
        `context_attention`.
      past: latents of N pieces, [N, B, T, ...] each; those from `index` on are not
        read.
      index: int32, number of this piece, 0 <= index < N.
      start_BT: int32, the first token of each token's document, counted from the first
        of this piece: negative if that lies before it. Padding starts at itself.

    Returns:
      [B, T, H, V] in float32 or wider, of no meaning at padding, and the largest scaled
      score of each row, [B, T, H], without a gradient.
    """
    k, v = jax.eval_shape(expand, parameters, latents)
    check_inputs(q_BTHK, k, v, None, block_size)
    C, padding = block_and_padding(q_BTHK.shape[1], block_size)
    settings = _Settings(expand, None, float(scale), C, padding, False)
    held = past, jnp.asarray(index, jnp.int32)
    return _attend(q_BTHK, latents, parameters, start_BT, held, settings)


def _attend_masked(
    q_BTHK, latents, expand, parameters, axis, form, scale, segment_ids_BT, block_size
):
    """Output, and row maxima: 0 and -inf at padding."""
    k, v = jax.eval_shape(expand, parameters, latents)
    check_inputs(q_BTHK, k, v, segment_ids_BT, block_size)
    if form not in ("gather", "ring"):
        raise ValueError(
            f"form={form!r} does not exist; choose 'gather' or 'ring', or ask "
            "choose_attention"
        )
    B, T, *_ = q_BTHK.shape
    if segment_ids_BT is None:
        start_BT = jnp.broadcast_to(-lax.axis_index(axis) * T, (B, T))
    else:
        start_BT = starts_relative(segment_ids_BT, axis)
    ring = form == "ring"
    C, padding = block_and_padding(T, block_size)
    settings = _Settings(expand, axis, float(scale), C, padding, ring)
    inputs = vary_like((q_BTHK, latents, parameters, start_BT))
    o_BTHV, max_BTH = _attend(*inputs, None, settings)
    if segment_ids_BT is None:
        return o_BTHV, max_BTH
    real_BT1 = (segment_ids_BT > 0)[:, :, None]
    o_BTHV = jnp.where(real_BT1[..., None], o_BTHV, 0)
    return o_BTHV, jnp.where(real_BT1, max_BTH, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BTHK, latents, parameters, start_BT, held, settings):
    """Output [B, T, H, V]; row maxima [B, T, H], without a gradient."""
    return _attend_fwd(q_BTHK, latents, parameters, start_BT, held, settings)[0]


def _attend_fwd(q_BTHK, latents, parameters, start_BT, held, settings):
    H, T = q_BTHK.shape[2], q_BTHK.shape[1]
    scale = settings.scale
    k, v = _expand(settings, parameters, latents)
    blocks, starts = _query_blocks(q_BTHK, start_BT, k.shape[2], settings)
    pieces = forward_blocks(blocks, k, v, _spans(starts, settings), scale)

    def visit(pieces, nothing, latents, behind):
        k, v = _expand(settings, parameters, latents)
        shown, spans = _before_all(blocks, starts, behind * T, T, settings)
        return forward_blocks(shown, k, v, spans, scale, pieces), nothing

    pieces, _ = _visit_earlier(visit, pieces, (), latents, start_BT, held, settings)
    o_BRGV, lse_BRG, max_BRG = (join(x) for x in jax.vmap(finish)(pieces))
    o_BTHV = heads(o_BRGV, H)[:, :T]
    max_BTH = heads(max_BRG[..., None], H)[:, :T, :, 0]
    saved = q_BTHK, latents, parameters, start_BT, held, o_BTHV, lse_BRG
    return (o_BTHV, max_BTH), saved


def _attend_bwd(settings, saved, cotangents):
    q_BTHK, latents, parameters, start_BT, held, o_BTHV, lse_BRG = saved
    H, T = q_BTHK.shape[2], q_BTHK.shape[1]
    # Without the barrier XLA would keep what the forward pass fetched.
    latents = lax.optimization_barrier(latents)
    k, v = jax.eval_shape(settings.expand, parameters, latents)
    blocks, starts = _query_blocks(q_BTHK, start_BT, k.shape[2], settings)
    o_BTHV, do_BTHV = (_pad(x, settings) for x in (o_BTHV, cotangents[0]))
    out = blocks_of(row_cotangents(o_BTHV, do_BTHV, lse_BRG, v), len(blocks.last_1R))

    def piece_grads(blocks, spans, latents):
        (k, v), pull = jax.vjp(partial(_expand, settings), parameters, latents)
        dq_N, dk, dv = block_grads(blocks, out, k, v, spans, settings.scale)
        dkeys = dk.astype(k.dtype), dv.astype(v.dtype)
        dparameters, dlatents = jax.tree.map(_widen, pull(dkeys))
        return (dq_N, dparameters), dlatents

    def visit(grads, dlatents, latents, behind):
        shown, spans = _before_all(blocks, starts, behind * T, T, settings)
        more = piece_grads(shown, spans, latents)
        return jax.tree.map(jnp.add, (grads, dlatents), more)

    first_N, index_N = _spans(starts, settings)
    grads, dlatents = piece_grads(blocks, (first_N, index_N + 1), latents)
    (dq_N, dparameters), dlatents = _visit_earlier(
        visit, grads, dlatents, latents, start_BT, held, settings
    )
    dq_BTHK = heads(join(dq_N), H)[:, :T]
    dheld = None
    if held is not None:
        past, index = held
        dpast, dlatents = dlatents, _take(dlatents, index)
        dpast = _put(dpast, jax.tree.map(jnp.zeros_like, dlatents), index)
        dheld = _as(dpast, past), None
    grads = dq_BTHK, dlatents, dparameters
    return *_as(grads, (q_BTHK, latents, parameters)), None, dheld


_attend.defvjp(_attend_fwd, _attend_bwd)


def _visit_earlier(visit, carry, companion, latents, start_BT, held, settings):
    """Visits the pieces of earlier ranks that any row here looks at, nearest first.

    visit(carry, companion, latents, behind) -> (carry, companion) gets the piece of the
    rank `behind` ranks earlier. The companion belongs to the piece, not to this rank:
    all visitors of a piece add to it, and its owner gets the sum. Where the pieces are
    held, so are their companions: the visitor gets all of them, its own included.
    """
    T = start_BT.shape[1]
    count = (T - 1 - jnp.min(start_BT)) // T
    if held is not None:
        past, index = held
        return _pieces(visit, carry, companion, past, index, count)
    if lax.axis_size(settings.axis) == 1:
        return carry, companion
    form = _ring if settings.ring else _gathered
    return form(visit, carry, companion, latents, count, settings.axis)


def _gathered(visit, carry, companion, latents, count, axis):
    all_latents = lax.all_gather(latents, axis)
    carry, companions = _pieces(
        visit, carry, companion, all_latents, lax.axis_index(axis), count
    )
    return carry, jax.tree.map(lambda x: lax.psum_scatter(x, axis), companions)


def _pieces(visit, carry, companion, all_latents, rank, count):
    """Visits `count` of the pieces before `rank`; returns the companions of all."""
    N = len(jax.tree.leaves(all_latents)[0])
    zeros = jax.tree.map(lambda x: jnp.zeros((N, *x.shape), x.dtype), companion)
    companions = _put(vary_like(zeros, companion), companion, rank)

    def step(behind, state):
        carry, companions = state
        r = rank - behind
        own = _take(companions, r), _take(all_latents, r)
        carry, companion = visit(carry, *own, behind)
        return carry, _put(companions, companion, r)

    return lax.fori_loop(1, count + 1, step, (carry, companions))


def _ring(visit, carry, companion, latents, count, axis):
    R = lax.axis_size(axis)
    send = partial(from_earlier, axis=axis, wrap=True)

    def visit_if_seen(carry, companion, latents, behind):
        carry, companion = lax.cond(
            behind <= count,
            lambda state: visit(*state, latents, behind),
            lambda state: state,
            (carry, companion),
        )
        return carry, send(companion)

    def hop(state, behind):
        carry, companion, latents = state
        # Sent before the visit, which needs the time that the next piece travels.
        coming = send(latents)
        return (*visit_if_seen(carry, companion, latents, behind), coming), None

    state = carry, send(companion), send(latents)
    (carry, companion, latents), _ = lax.scan(hop, state, jnp.arange(1, R - 1))
    return visit_if_seen(carry, companion, latents, R - 1)


def _take(tree, index):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), tree)


def _put(tree, parts, index):
    def put(x, part):
        return lax.dynamic_update_index_in_dim(x, part, index, 0)

    return jax.tree.map(put, tree, parts)


def _expand(settings, parameters, latents):
    """Keys and values of a piece, filled up to whole blocks."""
    return tuple(_pad(x, settings) for x in settings.expand(parameters, latents))


def _pad(x_BT, settings):
    return jnp.pad(x_BT, [(0, 0), (0, settings.padding)] + [(0, 0)] * (x_BT.ndim - 2))


def _query_blocks(q_BTHK, start_BT, groups, settings):
    """Rows by block, and their starts [B, T] filled up to whole blocks."""
    q_BTHK = _pad(q_BTHK, settings)
    start_BT = jnp.pad(start_BT, [(0, 0), (0, settings.padding)], mode="edge")
    t_T = jnp.arange(start_BT.shape[1], dtype=jnp.int32)
    rows = rows_of(q_BTHK, groups, start_BT, t_T)
    return blocks_of(rows, len(t_T) // settings.block), start_BT


def _spans(start_BT, settings):
    """For each query block the first key block to visit, and the diagonal one."""
    N = start_BT.shape[1] // settings.block
    first_N = jnp.clip(first_blocks(start_BT, N), 0, N)
    return first_N, jnp.arange(N, dtype=jnp.int32)


def _before_all(blocks, start_BT, distance, T, settings):
    """Rows and spans for T keys that lie `distance` tokens before this rank's."""
    start_NBr = blocks.start_BR + distance
    blocks = Rows(blocks.q_BRGK, start_NBr, jnp.full_like(blocks.last_1R, T - 1))
    first_N, _ = _spans(start_BT + distance, settings)
    return blocks, (first_N, jnp.full_like(first_N, first_N.shape[0]))


def _as(tree, like):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
