"""Causal softmax attention that never holds a T x T array.

Scores exist one [block, block] tile at a time: an online softmax walks the key
blocks of each query block, and a hand-written backward pass walks them again from
the saved log-sum-exp, so a layer keeps only q, k, v, its output and one number per
row. Tiles above the diagonal, and before the oldest document that a query block
touches, are skipped. Up to `block_size` tokens there is one tile and no loop.

Axis letters: C tokens of a block, M query heads that share a key head (H = G M), R
query rows: the M heads of a token are treated as M rows of one head, which turns
grouped attention into plain attention with G heads. B and G are never merged into
another axis, so both may be sharded.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.segments import check_segment_ids, document_starts


def attention(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    *,
    scale: float,
    segment_ids_BT: Array | None = None,
    block_size: int = 512,
) -> Array:
    """softmax(scale q k^T) v over the past of each token's own document.

    Matmuls run in the input dtype and accumulate in float32 or wider, as does the
    softmax. The output stays wide: rounding it to bfloat16 during training biases
    the gradient (Kimi K3 report, Gated MLA). Reverse-mode differentiation only.

    Args:
      q_BTHK: [B, T, H, K], T >= 1.
      k_BTGK: [B, T, G, K], H a multiple of G; query head h reads key head h G // H.
      v_BTGV: [B, T, G, V]; V may differ from K.
      scale: factor on the scores, a Python number.
      segment_ids_BT: int [B, T], 0 = padding, or None for one document per row.
      block_size: largest tile edge; scores held at once are block_size^2. Large for
        GPU and TPU. 64 is fastest on a CPU, also at short T: it skips more.

    Returns:
      [B, T, H, V] in float32 or wider, 0 at padding, whose inputs get no gradient.

    Raises:
      ValueError: shapes or dtypes do not match, H % G != 0, or block_size < 1.
    """
    inputs = q_BTHK, k_BTGK, v_BTGV
    return _attend_masked(*inputs, scale, segment_ids_BT, block_size, False)[0]


def attention_with_max_logits(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    *,
    scale: float,
    segment_ids_BT: Array | None = None,
    block_size: int = 512,
) -> tuple[Array, Array]:
    """`attention`, and the largest of the scaled scores of each head.

    Takes and raises what `attention` does. Costs one more number per row.

    Returns:
      The output, and max_logit_H in its dtype: over the batch, over the pairs that the
      softmax sees; -inf if all is padding. It carries no gradient.
    """
    o_BTHV, max_BTH = _attend_masked(
        q_BTHK, k_BTGK, v_BTGV, scale, segment_ids_BT, block_size, True
    )
    return o_BTHV, lax.stop_gradient(jnp.max(max_BTH, axis=(0, 1)))


def attention_reference(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    *,
    scale: float,
    segment_ids_BT: Array | None = None,
) -> Array:
    """The same map, written plainly with a whole [B, H, T, T] score array."""
    B, T, H, _ = q_BTHK.shape
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q_BTHK, k_BTGK, v_BTGV))
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids_BT is None else segment_ids_BT
    changed_BT = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))
    run_BT = jnp.cumsum(changed_BT, axis=1)
    same_BTT = run_BT[:, :, None] == run_BT[:, None, :]
    visible_BTT = same_BTT & jnp.tril(jnp.ones((T, T), bool))
    scores_BHTT = scale * jnp.einsum("bthk,bshk->bhts", q, k)
    scores_BHTT = jnp.where(visible_BTT[:, None], scores_BHTT, -jnp.inf)
    o_BTHV = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores_BHTT, axis=-1), v)
    return jnp.where((ids_BT > 0)[:, :, None, None], o_BTHV, 0)


def _attend_masked(q, k, v, scale, segment_ids_BT, block_size, with_max):
    """Output, and row maxima or None: 0 and -inf at padding."""
    _check(q, k, v, segment_ids_BT, block_size)
    if segment_ids_BT is None:
        return _attend_padded(q, k, v, None, float(scale), block_size, with_max)
    # Padding sees itself alone, which keeps its softmax finite until it is dropped.
    t_T = jnp.arange(q.shape[1], dtype=jnp.int32)
    start_BT = jnp.minimum(document_starts(segment_ids_BT), t_T)
    o_BTHV, max_BTH = _attend_padded(
        q, k, v, start_BT, float(scale), block_size, with_max
    )
    real_BT1 = (segment_ids_BT > 0)[:, :, None]
    o_BTHV = jnp.where(real_BT1[..., None], o_BTHV, 0)
    return o_BTHV, jnp.where(real_BT1, max_BTH, -jnp.inf) if with_max else None


def _attend_padded(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, block_size, with_max):
    """Attends in the fewest equal blocks of at most `block_size` tokens."""
    T = q_BTHK.shape[1]
    if block_size >= T:
        return _attend(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, T, with_max)
    N = -(-T // block_size)
    C = min(block_size, -(-T // (16 * N)) * 16)
    extra = [(0, 0), (0, N * C - T)]
    q_BTHK, k_BTGK, v_BTGV = (
        jnp.pad(x, [*extra, (0, 0), (0, 0)]) for x in (q_BTHK, k_BTGK, v_BTGV)
    )
    if start_BT is not None:
        start_BT = jnp.pad(start_BT, extra, mode="edge")
    out = _attend(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, C, with_max)
    return jax.tree.map(lambda x: x[:, :T], out)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, C, with_max):
    """Output [B, T, H, V]; row maxima [B, T, H] or None, without a gradient."""
    return _attend_fwd(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, C, with_max)[0]


def _attend_fwd(q_BTHK, k_BTGK, v_BTGV, start_BT, scale, C, with_max):
    T, H = q_BTHK.shape[1:3]
    rows = _rows(q_BTHK, k_BTGK.shape[2]), _row_starts(start_BT, q_BTHK, k_BTGK)
    if T == C:
        pieces = _tile(rows, k_BTGK, v_BTGV, 0, 0, scale, C)
        o_BRGV, lse_BRG, max_BRG = _finish(pieces, with_max)
    else:
        o_BRGV, lse_BRG, max_BRG = _forward_blocks(
            rows, k_BTGK, v_BTGV, start_BT, scale, C, with_max
        )
    o_BTHV = _heads(o_BRGV, H)
    max_BTH = _heads(max_BRG[..., None], H)[..., 0] if with_max else None
    return (o_BTHV, max_BTH), (q_BTHK, k_BTGK, v_BTGV, start_BT, o_BTHV, lse_BRG)


def _attend_bwd(scale, C, with_max, saved, cotangents):
    do_BTHV, _ = cotangents
    q_BTHK, k_BTGK, v_BTGV, start_BT, o_BTHV, lse_BRG = saved
    T, H = q_BTHK.shape[1:3]
    G = k_BTGK.shape[2]
    # The softmax Jacobian needs only the row sums of p * dp, and those are do . o.
    delta_BRG = _rows(jnp.sum(do_BTHV * o_BTHV, axis=-1, keepdims=True), G)[..., 0]
    do_BRGV = _rows(do_BTHV.astype(v_BTGV.dtype), G)
    q_BRGK, starts = _rows(q_BTHK, G), _row_starts(start_BT, q_BTHK, k_BTGK)
    rows = q_BRGK, starts, do_BRGV, lse_BRG, delta_BRG
    if T == C:
        dq_BRGK, dk, dv = _tile_grads(rows, k_BTGK, v_BTGV, 0, 0, scale, C)
    else:
        dq_BRGK, dk, dv = _backward_blocks(rows, k_BTGK, v_BTGV, start_BT, scale, C)
    dq = _heads(dq_BRGK, H) * scale
    dk = dk * scale
    return *(g.astype(q_BTHK.dtype) for g in (dq, dk, dv)), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward_blocks(rows, k_BTGK, v_BTGV, start_BT, scale, C, with_max):
    def query_block(_, block):
        i, first, rows_i = block

        def key_block(j, seen):
            k_BCGK, v_BCGV = (_slice(x, j, C) for x in (k_BTGK, v_BTGV))
            return _tile(rows_i, k_BCGK, v_BCGV, i, j, scale, C, seen)

        # Every row sees itself, so the diagonal tile makes all row maxima finite.
        diagonal = key_block(i, None)
        pieces = lax.fori_loop(first, i, key_block, diagonal)
        return None, _finish(pieces, with_max)

    N = k_BTGK.shape[1] // C
    _, out = lax.scan(query_block, None, _query_blocks(rows, start_BT, N))
    return jax.tree.map(_join, out)


def _backward_blocks(rows, k_BTGK, v_BTGV, start_BT, scale, C):
    dtype = rows[-1].dtype

    def query_block(carry, block):
        i, first, rows_i = block

        def key_block(j, carry):
            dq, dk_BTGK, dv_BTGV = carry
            k_BCGK, v_BCGV = (_slice(x, j, C) for x in (k_BTGK, v_BTGV))
            dq_j, dk_j, dv_j = _tile_grads(rows_i, k_BCGK, v_BCGV, i, j, scale, C)
            return dq + dq_j, _add(dk_BTGK, dk_j, j), _add(dv_BTGV, dv_j, j)

        dq = jnp.zeros(rows_i[0].shape, dtype)
        dq, *carry = lax.fori_loop(first, i + 1, key_block, (dq, *carry))
        return tuple(carry), dq

    N = k_BTGK.shape[1] // C
    carry = jnp.zeros(k_BTGK.shape, dtype), jnp.zeros(v_BTGV.shape, dtype)
    carry, dq = lax.scan(query_block, carry, _query_blocks(rows, start_BT, N))
    return _join(dq), *carry


def _tile(rows, k_BCGK, v_BCGV, i, j, scale, C, seen=None):
    """Row max, row sum, unnormalised output: over tile (i, j) and the tiles `seen`."""
    q_BRGK, start_BR = rows
    s_BGRC = _scores(q_BRGK, k_BCGK, start_BR, i, j, scale, C)
    max_BGR = jnp.max(s_BGRC, axis=-1)
    if seen is not None:
        max_BGR = jnp.maximum(max_BGR, seen[0])
    p_BGRC = jnp.exp(s_BGRC - max_BGR[..., None])
    sum_BGR = jnp.sum(p_BGRC, axis=-1)
    o_BGRV = _einsum("bgrc,bcgv->bgrv", p_BGRC.astype(v_BCGV.dtype), v_BCGV)
    if seen is not None:
        shrink_BGR = jnp.exp(seen[0] - max_BGR)
        sum_BGR += shrink_BGR * seen[1]
        o_BGRV += shrink_BGR[..., None] * seen[2]
    return max_BGR, sum_BGR, o_BGRV


def _finish(pieces, with_max):
    """Output [B, R, G, V], row log-sum-exp [B, R, G], row maximum [B, R, G] or None."""
    max_BGR, sum_BGR, o_BGRV = pieces
    lse_BGR = max_BGR + jnp.log(sum_BGR)
    out = o_BGRV / sum_BGR[..., None], lse_BGR, max_BGR if with_max else None
    return jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), out)


def _tile_grads(rows, k_BCGK, v_BCGV, i, j, scale, C):
    """What one tile adds to the gradients of its queries, keys and values.

    Those of queries and keys still lack the factor `scale`.
    """
    q_BRGK, start_BR, do_BRGV, lse_BRG, delta_BRG = rows
    lse_BGR1, delta_BGR1 = (
        jnp.moveaxis(x, 1, 2)[..., None] for x in (lse_BRG, delta_BRG)
    )
    s_BGRC = _scores(q_BRGK, k_BCGK, start_BR, i, j, scale, C)
    p_BGRC = jnp.exp(s_BGRC - lse_BGR1)
    dp_BGRC = _einsum("brgv,bcgv->bgrc", do_BRGV, v_BCGV)
    ds_BGRC = (p_BGRC * (dp_BGRC - delta_BGR1)).astype(q_BRGK.dtype)
    dq_BRGK = _einsum("bgrc,bcgk->brgk", ds_BGRC, k_BCGK)
    dk_BCGK = _einsum("bgrc,brgk->bcgk", ds_BGRC, q_BRGK)
    dv_BCGV = _einsum("bgrc,brgv->bcgv", p_BGRC.astype(v_BCGV.dtype), do_BRGV)
    return dq_BRGK, dk_BCGK, dv_BCGV


def _scores(q_BRGK, k_BCGK, start_BR, i, j, scale, C):
    """Scaled scores [B, G, R, C] of tile (i, j), -inf where a row may not look."""
    s_BGRC = _einsum("brgk,bcgk->bgrc", q_BRGK, k_BCGK) * scale
    s_1C = j * C + jnp.arange(C)[None, :]
    t_R1 = i * C + jnp.repeat(jnp.arange(C), q_BRGK.shape[1] // C)[:, None]
    visible = s_1C <= t_R1
    if start_BR is not None:
        visible = (visible & (s_1C >= start_BR[:, :, None]))[:, None]
    return jnp.where(visible, s_BGRC, -jnp.inf)


def _rows(x_BTHK, G):
    """[B, T, H, K] -> [B, R, G, K] with row t * M + m for head g * M + m."""
    B, T, H, K = x_BTHK.shape
    x_BTGMK = x_BTHK.reshape(B, T, G, H // G, K)
    return jnp.swapaxes(x_BTGMK, 2, 3).reshape(B, T * (H // G), G, K)


def _heads(x_BRGV, H):
    """Undoes `_rows`."""
    B, R, G, V = x_BRGV.shape
    x_BTMGV = x_BRGV.reshape(B, R * G // H, H // G, G, V)
    return jnp.swapaxes(x_BTMGV, 2, 3).reshape(B, R * G // H, H, V)


def _row_starts(start_BT, q_BTHK, k_BTGK):
    M = q_BTHK.shape[2] // k_BTGK.shape[2]
    return None if start_BT is None else jnp.repeat(start_BT, M, axis=1)


def _query_blocks(rows, start_BT, N):
    """Scan inputs: block index, first key block to visit, and the rows by block."""
    index_N = jnp.arange(N, dtype=jnp.int32)
    first_N = jnp.zeros_like(index_N)
    if start_BT is not None:
        B, T = start_BT.shape
        first_N = jnp.min(start_BT.reshape(B, N, T // N), axis=(0, 2)) // (T // N)
    split = partial(_split, N=N)
    return index_N, first_N, jax.tree.map(split, rows)


def _split(x_BR, N):
    B, R = x_BR.shape[:2]
    return jnp.moveaxis(x_BR.reshape(B, N, R // N, *x_BR.shape[2:]), 1, 0)


def _join(x_NBR):
    N, B, R = x_NBR.shape[:3]
    return jnp.moveaxis(x_NBR, 0, 1).reshape(B, N * R, *x_NBR.shape[3:])


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


def _check(q_BTHK, k_BTGK, v_BTGV, segment_ids_BT, block_size):
    shapes = f"q {q_BTHK.shape}, k {k_BTGK.shape}, v {v_BTGV.shape}"
    if not q_BTHK.ndim == k_BTGK.ndim == v_BTGV.ndim == 4:
        raise ValueError(
            f"attention got {shapes}, expected four axes each: q [B, T, H, K], "
            "k [B, T, G, K], v [B, T, G, V]"
        )
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    if k_BTGK.shape != (B, T, G, K) or v_BTGV.shape[:3] != (B, T, G):
        raise ValueError(
            f"attention got {shapes}, expected q [B, T, H, K], k [B, T, G, K], "
            "v [B, T, G, V] with equal B, T, K and G"
        )
    if H % G:
        raise ValueError(
            f"attention got H={H} query heads and G={G} key heads, expected H to be a "
            "multiple of G; change one of the two head counts"
        )
    dtypes = {x.dtype for x in (q_BTHK, k_BTGK, v_BTGV)}
    if len(dtypes) > 1:
        raise ValueError(
            f"attention got dtypes {sorted(map(str, dtypes))}, expected one; cast q, k "
            "and v to the compute dtype"
        )
    if block_size < 1:
        raise ValueError(
            f"block_size is {block_size}, expected >= 1; the default is 512"
        )
    if segment_ids_BT is not None:
        check_segment_ids(segment_ids_BT, (B, T))
