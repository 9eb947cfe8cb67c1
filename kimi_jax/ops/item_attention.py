"""Softmax attention of every patch to all patches of its own item, in both directions.

The tiles are those of the causal attention (`attention_blocks`), with other bounds: a
patch sees the keys from the first to the last of its item. No P x P array exists, and
tiles without a pair of one item are not visited.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

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
    tile,
    tile_grads,
)
from kimi_jax.ops.segments import check_segment_ids, document_starts


def item_attention(
    q_BPHK: Array,
    k_BPHK: Array,
    v_BPHK: Array,
    item_BP: Array,
    *,
    scale: float,
    block_size: int,
) -> Array:
    """softmax(scale q k^T) v over the item of each patch.

    Matmuls run in the input dtype; they and the softmax accumulate in float32 or wider.

    Args:
      q_BPHK, k_BPHK, v_BPHK: [B, P, H, K] each, of one dtype.
      item_BP: int [B, P], 0 = padding; an item is a run of equal ids.
      scale: factor on the scores, a Python number.
      block_size: largest tile edge; scores held at once are block_size^2.

    Returns:
      [B, P, H, K] in float32 or wider, 0 at padding, whose inputs get no gradient.

    Raises:
      ValueError: item_BP is not integer [B, P].
    """
    check_segment_ids(item_BP, q_BPHK.shape[:2])
    P = q_BPHK.shape[1]
    first_BP, last_BP = item_bounds(item_BP)
    C, padding = block_and_padding(P, block_size)
    extra = [(0, 0), (0, padding)]
    arrays = (jnp.pad(x, [*extra, (0, 0), (0, 0)]) for x in (q_BPHK, k_BPHK, v_BPHK))
    # What is appended sees the last patch, which keeps its softmax finite.
    bounds = (jnp.pad(x, extra, mode="edge") for x in (first_BP, last_BP))
    o_BPHK = _attend(*arrays, *bounds, float(scale), C)[:, :P]
    return jnp.where((item_BP > 0)[:, :, None, None], o_BPHK, 0)


def item_bounds(item_BP: Array) -> tuple[Array, Array]:
    """Index of the first and last patch of each patch's item; padding has itself."""
    P = item_BP.shape[1]
    p_P = jnp.arange(P, dtype=jnp.int32)
    first_BP = jnp.minimum(document_starts(item_BP), p_P)
    last_BP = P - 1 - document_starts(item_BP[:, ::-1])[:, ::-1]
    return first_BP, jnp.where(item_BP > 0, last_BP, p_P)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q_BPHK, k_BPHK, v_BPHK, first_BP, last_BP, scale, C):
    return _attend_fwd(q_BPHK, k_BPHK, v_BPHK, first_BP, last_BP, scale, C)[0]


def _attend_fwd(q_BPHK, k_BPHK, v_BPHK, first_BP, last_BP, scale, C):
    P, H = q_BPHK.shape[1:3]
    rows = _rows(q_BPHK, first_BP, last_BP)
    if P == C:
        o_BRHK, lse_BRH, _ = finish(tile(rows, k_BPHK, v_BPHK, 0, scale))
    else:
        N = P // C
        blocks, (first_N, stop_N) = blocks_of(rows, N), _spans(first_BP, last_BP, N)
        own_N = jnp.arange(N, dtype=jnp.int32)
        # Its own block first, in which every patch sees itself; then those after it.
        before = (first_N, own_N)
        pieces = forward_blocks(blocks, k_BPHK, v_BPHK, before, scale)
        after = (own_N + 1, stop_N)
        pieces = forward_blocks(blocks, k_BPHK, v_BPHK, after, scale, pieces)
        o_BRHK, lse_BRH, _ = (join(x) for x in jax.vmap(finish)(pieces))
    o_BPHK = heads(o_BRHK, H)
    return o_BPHK, (q_BPHK, k_BPHK, v_BPHK, first_BP, last_BP, o_BPHK, lse_BRH)


def _attend_bwd(scale, C, saved, do_BPHK):
    q_BPHK, k_BPHK, v_BPHK, first_BP, last_BP, o_BPHK, lse_BRH = saved
    P, H = q_BPHK.shape[1:3]
    rows = _rows(q_BPHK, first_BP, last_BP)
    out = row_cotangents(o_BPHK, do_BPHK, lse_BRH, v_BPHK)
    if P == C:
        dq_BRHK, dk, dv = tile_grads(rows, out, k_BPHK, v_BPHK, 0, scale)
    else:
        spans = _spans(first_BP, last_BP, P // C)
        blocks, out = blocks_of((rows, out), P // C)
        dq_N, dk, dv = block_grads(blocks, out, k_BPHK, v_BPHK, spans, scale)
        dq_BRHK = join(dq_N)
    grads = heads(dq_BRHK, H), dk, dv
    return *(g.astype(q_BPHK.dtype) for g in grads), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _rows(q_BPHK: Array, first_BP: Array, last_BP: Array) -> Rows:
    # One head of keys for each of queries, so rows are patches. Unlike a causal row's,
    # the last key differs from row to row of the batch.
    rows = rows_of(q_BPHK, q_BPHK.shape[2], first_BP, last_BP[0])
    return rows._replace(last_1R=last_BP)


def _spans(first_BP: Array, last_BP: Array, N: int) -> tuple[Array, Array]:
    """The key blocks first <= j < stop that each of N query blocks has to visit."""
    B, P = last_BP.shape
    last_N = jnp.max(last_BP.reshape(B, N, P // N), axis=(0, 2)) // (P // N)
    return first_blocks(first_BP, N), last_N + 1
