"""Causal softmax attention that never holds a T x T array.

Scores exist one [block, block] tile at a time: an online softmax walks the key
blocks of each query block, and a hand-written backward pass walks them again from
the saved log-sum-exp, so a layer keeps only q, k, v, its output and one number per
row. Tiles above the diagonal, and before the oldest document that a query block
touches, are skipped. Up to `block_size` tokens there is one tile and no loop.

The loops and their axis letters are in `attention_blocks.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.attention_blocks import (
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
    check_inputs(q, k, v, segment_ids_BT, block_size)
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
    T = q_BTHK.shape[1]
    C, padding = block_and_padding(T, block_size)
    extra = [(0, 0), (0, padding)]
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
    rows = _rows(q_BTHK, k_BTGK, start_BT)
    if T == C:
        o_BRGV, lse_BRG, max_BRG = finish(tile(rows, k_BTGK, v_BTGV, 0, scale))
    else:
        blocks, spans = blocks_of(rows, T // C), _spans(start_BT, T // C)
        pieces = forward_blocks(blocks, k_BTGK, v_BTGV, spans, scale)
        o_BRGV, lse_BRG, max_BRG = (join(x) for x in jax.vmap(finish)(pieces))
    o_BTHV = heads(o_BRGV, H)
    max_BTH = heads(max_BRG[..., None], H)[..., 0] if with_max else None
    return (o_BTHV, max_BTH), (q_BTHK, k_BTGK, v_BTGV, start_BT, o_BTHV, lse_BRG)


def _attend_bwd(scale, C, with_max, saved, cotangents):
    do_BTHV, _ = cotangents
    q_BTHK, k_BTGK, v_BTGV, start_BT, o_BTHV, lse_BRG = saved
    T, H = q_BTHK.shape[1:3]
    rows = _rows(q_BTHK, k_BTGK, start_BT)
    out = row_cotangents(o_BTHV, do_BTHV, lse_BRG, v_BTGV)
    if T == C:
        dq_BRGK, dk, dv = tile_grads(rows, out, k_BTGK, v_BTGV, 0, scale)
    else:
        blocks, out = blocks_of((rows, out), T // C)
        first_N, index_N = _spans(start_BT, T // C)
        spans = first_N, index_N + 1
        dq_NBrGK, dk, dv = block_grads(blocks, out, k_BTGK, v_BTGV, spans, scale)
        dq_BRGK = join(dq_NBrGK)
    grads = heads(dq_BRGK, H), dk, dv
    return *(g.astype(q_BTHK.dtype) for g in grads), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _rows(q_BTHK, k_BTGK, start_BT):
    t_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.int32)
    return rows_of(q_BTHK, k_BTGK.shape[2], start_BT, t_T)


def _spans(start_BT, N):
    """For each query block the first key block to visit, and the diagonal one."""
    index_N = jnp.arange(N, dtype=jnp.int32)
    if start_BT is None:
        return jnp.zeros_like(index_N), index_N
    return first_blocks(start_BT, N), index_N


def check_inputs(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    segment_ids_BT: Array | None,
    block_size: int,
) -> None:
    """Raises ValueError unless the arguments fit together, see `attention`."""
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
