"""Online softmax over tiles of scores: what every form of attention here walks.

Axis letters: C tokens of a block, N blocks, M query heads that share a key head
(H = G M), R query rows: the M heads of a token are treated as M rows of one head,
which turns grouped attention into plain attention with G heads. r rows of a block.
B and G are never merged into another axis, so both may be sharded.

Each row sees the keys from `start` to `last`, counted from the first key of the array
that it is shown. One tile is [r, C] scores; `pieces` are the row maximum, row sum and
unnormalised output of the tiles seen so far.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Rows(NamedTuple):
    """Queries: q_BRGK; start_BR, None where all see the first key; last_1R."""

    q_BRGK: Array
    start_BR: Array | None
    last_1R: Array  # [B, R] where rows of the batch differ


class RowCotangents(NamedTuple):
    """What the backward pass knows of each row: do_BRGV; lse_BRG; delta_BRG = do . o.

    The softmax Jacobian needs only the row sums of p * dp, and those are do . o.
    """

    do_BRGV: Array
    lse_BRG: Array
    delta_BRG: Array


def block_and_padding(T: int, block_size: int) -> tuple[int, int]:
    """Fewest equal blocks of at most `block_size`: their size, tokens to append."""
    if block_size >= T:
        return T, 0
    N = -(-T // block_size)
    C = min(block_size, -(-T // (16 * N)) * 16)
    return C, N * C - T


def rows_of(q_BTHK: Array, groups: int, start_BT: Array | None, last_T: Array) -> Rows:
    M = q_BTHK.shape[2] // groups
    start_BR = None if start_BT is None else jnp.repeat(start_BT, M, axis=1)
    last_1R = jnp.repeat(jnp.atleast_2d(last_T), M, axis=1)
    return Rows(_merge(q_BTHK, groups), start_BR, last_1R)


def row_cotangents(
    o_BTHV: Array, do_BTHV: Array, lse_BRG: Array, v_BTGV: Array
) -> RowCotangents:
    G = v_BTGV.shape[2]
    delta_BTH1 = jnp.sum(do_BTHV * o_BTHV, axis=-1, keepdims=True)
    do_BRGV = _merge(do_BTHV.astype(v_BTGV.dtype), G)
    return RowCotangents(do_BRGV, lse_BRG, _merge(delta_BTH1, G)[..., 0])


def heads(x_BRGV: Array, H: int) -> Array:
    """[B, R, G, V] -> [B, T, H, V]."""
    B, R, G, V = x_BRGV.shape
    x_BTMGV = x_BRGV.reshape(B, R * G // H, H // G, G, V)
    return jnp.swapaxes(x_BTMGV, 2, 3).reshape(B, R * G // H, H, V)


def blocks_of(rows, N: int):
    """Splits the row axis of every array: [B, R, ...] -> [N, B, r, ...]."""

    def split(x_BR):
        B, R = x_BR.shape[:2]
        return jnp.moveaxis(x_BR.reshape(B, N, R // N, *x_BR.shape[2:]), 1, 0)

    return jax.tree.map(split, rows)


def join(x_NBr: Array) -> Array:
    """Undoes `blocks_of` for one array."""
    N, B, r = x_NBr.shape[:3]
    return jnp.moveaxis(x_NBr, 0, 1).reshape(B, N * r, *x_NBr.shape[3:])


def first_blocks(start_BT: Array, N: int) -> Array:
    """First of N key blocks that each of N query blocks has to visit: [N]."""
    B, T = start_BT.shape
    return jnp.min(start_BT.reshape(B, N, T // N), axis=(0, 2)) // (T // N)


def forward_blocks(blocks, k_BTGK, v_BTGV, spans, scale, pieces_N=None):
    """Shows each query block the key blocks `first <= j < stop`: pieces, N in front.

    `spans` holds first_N and stop_N.

    Without pieces of earlier keys, block `stop` itself comes first. Every row must see
    a key of it, which makes all row maxima finite.
    """
    C = k_BTGK.shape[1] // len(spans[0])

    def query_block(_, block):
        first, stop, rows, pieces = block

        def key_block(j, pieces):
            k_BCGK, v_BCGV = (_slice(x, j, C) for x in (k_BTGK, v_BTGV))
            return tile(rows, k_BCGK, v_BCGV, j * C, scale, pieces)

        if pieces is None:
            pieces = key_block(stop, None)
        return None, lax.fori_loop(first, stop, key_block, pieces)

    return lax.scan(query_block, None, (*spans, blocks, pieces_N))[1]


def block_grads(blocks, cotangents, k_BTGK, v_BTGV, spans, scale):
    """Gradients of queries [N, B, r, G, K], keys and values, all wide.

    Over the tiles of key blocks `first <= j < stop` of `spans`.
    """
    C = k_BTGK.shape[1] // len(spans[0])
    dtype = cotangents.delta_BRG.dtype

    def query_block(carry, block):
        first, stop, rows, out = block

        def key_block(j, carry):
            dq, dk_BTGK, dv_BTGV = carry
            k_BCGK, v_BCGV = (_slice(x, j, C) for x in (k_BTGK, v_BTGV))
            dq_j, dk_j, dv_j = tile_grads(rows, out, k_BCGK, v_BCGV, j * C, scale)
            return dq + dq_j, _add(dk_BTGK, dk_j, j), _add(dv_BTGV, dv_j, j)

        dq = jnp.zeros_like(rows.q_BRGK, dtype)
        dq, *carry = lax.fori_loop(first, stop, key_block, (dq, *carry))
        return tuple(carry), dq

    carry = jnp.zeros_like(k_BTGK, dtype), jnp.zeros_like(v_BTGV, dtype)
    carry, dq_N = lax.scan(query_block, carry, (*spans, blocks, cotangents))
    return dq_N, *carry


def tile(rows, k_BCGK, v_BCGV, offset, scale, pieces=None):
    """Row max, row sum, unnormalised output: over this tile and those in `pieces`.

    `offset` is the index of the tile's first key, or the indices [C] of its keys.
    """
    s_BGRC = _scores(rows, k_BCGK, offset, scale)
    max_BGR = jnp.max(s_BGRC, axis=-1)
    if pieces is not None:
        max_BGR = jnp.maximum(max_BGR, pieces[0])
    p_BGRC = jnp.exp(s_BGRC - max_BGR[..., None])
    sum_BGR = jnp.sum(p_BGRC, axis=-1)
    o_BGRV = _einsum("bgrc,bcgv->bgrv", p_BGRC.astype(v_BCGV.dtype), v_BCGV)
    if pieces is not None:
        shrink_BGR = jnp.exp(pieces[0] - max_BGR)
        sum_BGR += shrink_BGR * pieces[1]
        o_BGRV += shrink_BGR[..., None] * pieces[2]
    return max_BGR, sum_BGR, o_BGRV


def finish(pieces):
    """Output [B, R, G, V], row log-sum-exp [B, R, G], row maximum [B, R, G]."""
    max_BGR, sum_BGR, o_BGRV = pieces
    out = o_BGRV / sum_BGR[..., None], max_BGR + jnp.log(sum_BGR), max_BGR
    return tuple(jnp.moveaxis(x, 2, 1) for x in out)


def tile_grads(rows, cotangents, k_BCGK, v_BCGV, offset, scale):
    """What one tile adds to the gradients of its queries, keys and values."""
    do_BRGV, *sums = cotangents
    lse_BGR1, delta_BGR1 = (jnp.moveaxis(x, 1, 2)[..., None] for x in sums)
    p_BGRC = jnp.exp(_scores(rows, k_BCGK, offset, scale) - lse_BGR1)
    dp_BGRC = _einsum("brgv,bcgv->bgrc", do_BRGV, v_BCGV)
    ds_BGRC = (p_BGRC * (dp_BGRC - delta_BGR1)).astype(rows.q_BRGK.dtype)
    dq_BRGK = _einsum("bgrc,bcgk->brgk", ds_BGRC, k_BCGK)
    dk_BCGK = _einsum("bgrc,brgk->bcgk", ds_BGRC, rows.q_BRGK)
    dv_BCGV = _einsum("bgrc,brgv->bcgv", p_BGRC.astype(v_BCGV.dtype), do_BRGV)
    return dq_BRGK * scale, dk_BCGK * scale, dv_BCGV


def _scores(rows, k_BCGK, offset, scale):
    """Scaled scores [B, G, R, C] of one tile, -inf where a row may not look."""
    q_BRGK, start_BR, last_1R = rows
    s_BGRC = _einsum("brgk,bcgk->bgrc", q_BRGK, k_BCGK) * scale
    if jnp.ndim(offset) == 0:
        offset = offset + jnp.arange(k_BCGK.shape[1])
    s_1C = offset[None, :]
    visible = s_1C <= last_1R[:, :, None]
    if start_BR is not None:
        visible = visible & (s_1C >= start_BR[:, :, None])
    return jnp.where(visible[:, None], s_BGRC, -jnp.inf)


def _merge(x_BTHK, G):
    """[B, T, H, K] -> [B, R, G, K] with row t * M + m for head g * M + m."""
    B, T, H, K = x_BTHK.shape
    x_BTGMK = x_BTHK.reshape(B, T, G, H // G, K)
    return jnp.swapaxes(x_BTGMK, 2, 3).reshape(B, T * (H // G), G, K)


def _slice(x_BT, j, C):
    return lax.dynamic_slice_in_dim(x_BT, j * C, C, axis=1)


def _add(x_BT, tile_BC, j):
    C = tile_BC.shape[1]
    return lax.dynamic_update_slice_in_dim(
        x_BT, _slice(x_BT, j, C) + tile_BC, j * C, axis=1
    )


def _einsum(equation, a, b):
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)
