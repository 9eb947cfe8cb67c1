"""What each chunk of C tokens needs before the state is known, for all chunks at once.

With G the running sum of the log decay inside a chunk (natural log, inclusive):

    M_ij = sum_d k_id k_jd exp(G_id - G_jd)   i > j
    P_ij = sum_d q_id k_jd exp(G_id - G_jd)   i >= j     (q already scaled)
    Kp = k exp(G)    Qp = q exp(G)    Kr = k exp(G_last - G)    gam = exp(G_last)

exp(G_i - G_j) has to be split into a row factor and a column factor to become a matrix
product, and exp(-G) alone overflows. So M and P are assembled from square blocks left
of the diagonal, each of which has a border between its columns and its rows: the decay
from column j up to the border and the decay from the border down to row i are both at
most 1. Their exponents are sums of log decays, never differences, so that nothing
overflows or cancels whatever the gate. Only the tiles of 16 tokens on the diagonal take
a short cut, and only if the gate is bounded. Later tokens enter neither factor, which
keeps outputs independent of the future to the last bit.

Arrays are laid out [N,B,H,C,...]: N chunks lead, ready for a scan. Suffixes below: S
tiles of 16 tokens, or blocks that grow from them; L tokens in a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.gates import Prepared
from pallas_kernels.kda.segments import ChunkMasks

Array = jax.Array

TILE = 16
# Blocks inside a tile that double up to it.
_SIZES = (1, 2, 4, 8)
# Far below where exp underflows to zero, also in float64. Keeps -inf out of sums.
_LOWEST_LOG_DECAY = -1e3


class Chunks(NamedTuple):
    """Chunked tensors; names as in the module docstring.

    v [N,B,H,C,V]; beta [N,B,H,C]; kp, qp, kr [N,B,H,C,K]; gam [N,B,H,K];
    m, p [N,B,H,C,C].
    """

    v: Array
    beta: Array
    kp: Array
    qp: Array
    kr: Array
    gam: Array
    m: Array
    p: Array


class Pairs(NamedTuple):
    """Log decays whose sum is right for the pairs of a tile that the mask selects."""

    to_row: Array
    from_col: Array
    mask_LL: np.ndarray


def to_chunks(x: Array, chunk: int) -> Array:
    """[B,T,H,...] -> [N,B,H,C,...]; a last partial chunk is filled up with zeros."""
    batch, time, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, -time % chunk), *((0, 0) for _ in rest)))
    x = x.reshape(batch, -1, chunk, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))


def from_chunks(x_NBHCV: Array, time: int) -> Array:
    """[N,B,H,C,V] -> [B,T,H,V]; drops what filled up the last chunk."""
    x_BNCHV = jnp.moveaxis(x_NBHCV, (0, 1, 2, 3), (1, 0, 3, 2))
    batch, _, _, heads, width = x_BNCHV.shape
    return x_BNCHV.reshape(batch, -1, heads, width)[:, :time]


def make_chunks(
    prepared: Prepared,
    masks: ChunkMasks | None,
    chunk: int,
    bounded: bool,
    precision: jax.lax.Precision,
) -> Chunks:
    """Computes everything that does not depend on the state; differentiable.

    Args:
      prepared: prepared tensors [B,T,HV,...].
      masks: documents of each chunk, or None for one document per row.
      chunk: tokens per chunk, 16 times a power of two.
      bounded: the caller guarantees g >= -5, which makes diagonal tiles cheaper.
      precision: of the matrix products.
    """
    q, k, v, g, beta = (to_chunks(x, chunk) for x in prepared)
    q_SLK, k_SLK, g_SLK = (_blocks(x, TILE) for x in (q, k, g))
    if not bounded:
        g_SLK = jnp.maximum(g_SLK, _LOWEST_LOG_DECAY)
    same = None if masks is None else _diagonal(masks.same_NB1CC)
    pre, post, pairs = _log_decays(g_SLK, same, bounded)
    m, p = _diagonal_tiles(q_SLK, k_SLK, pairs, precision)
    while m.shape[-1] < chunk:
        (_, q_odd), (k_even, k_odd) = _halves(q_SLK), _halves(k_SLK)
        (pre_even, pre_odd), (post_even, post_odd) = _halves(pre), _halves(post)
        to_row, col = jnp.exp(pre_odd), k_even * jnp.exp(post_even)
        m = _grow(m, _outer(k_odd * to_row, col, precision))
        p = _grow(p, _outer(q_odd * to_row, col, precision))
        post = _join(post_even + pre_odd[..., -1:, :], post_odd)
        pre = _join(pre_even, pre_odd + pre_even[..., -1:, :])
        q_SLK, k_SLK = _merge(q_SLK), _merge(k_SLK)
    m, p, pre, post = (x[..., 0, :, :] for x in (m, p, pre, post))
    decay = jnp.exp(pre)
    chunks = Chunks(
        v, beta, k * decay, q * decay, k * jnp.exp(post), decay[..., -1, :], m, p
    )
    return chunks if masks is None else _mask(chunks, masks)


def _mask(chunks: Chunks, masks: ChunkMasks) -> Chunks:
    """Cuts every path along which a document would see another one."""
    return chunks._replace(
        kp=jnp.where(masks.enters_NB1C1, chunks.kp, 0.0),
        qp=jnp.where(masks.enters_NB1C1, chunks.qp, 0.0),
        kr=jnp.where(masks.leaves_NB1C1, chunks.kr, 0.0),
        gam=jnp.where(masks.passes_NB11, chunks.gam, 0.0),
        m=jnp.where(masks.same_NB1CC, chunks.m, 0.0),
        p=jnp.where(masks.same_NB1CC, chunks.p, 0.0),
    )


def _log_decays(
    g_SLK: Array, same_SLL: Array | None, bounded: bool
) -> tuple[Array, Array, list[Pairs]]:
    """Adds up log decays over stretches of each tile, by products with 0 and 1.

    Returns:
      pre: over the tile's tokens up to and including token i.
      post: over the tile's tokens after token i.
      pairs: how to relate tokens of one tile, see `_diagonal_tiles`.
    """
    at, upto = np.arange(TILE), np.tri(TILE, dtype=bool)
    stretches = [upto & (at > 0)] if bounded else _dyadic_stretches()
    sums = _sums(np.concatenate([upto, ~upto, *stretches]), g_SLK)
    pre, post, *inside = jnp.split(sums, 2 + len(stretches), axis=-2)
    if not bounded:
        masks = map(_between_neighbours, _SIZES)
        pairs = [Pairs(x, x, mask) for x, mask in zip(inside, masks, strict=True)]
        return pre, post, pairs
    (since_first,) = inside
    if same_SLL is not None:
        # A document that starts inside the tile counts from its own first row. The
        # values are the same, but gradients before that row become exactly 0.
        inside_SLL = jnp.roll(same_SLL, 1, axis=-1) & stretches[0]
        since_first = _sums(inside_SLL, g_SLK)
    # The first row is the border. With g >= -5 the column factor is at most
    # exp(15 * 5), which float32 and bfloat16 hold (Kimi K3 report, Sec. 2).
    return pre, post, [Pairs(since_first, -since_first, np.tri(TILE, k=-1, dtype=bool))]


def _dyadic_stretches() -> list[np.ndarray]:
    """Stretches that relate the tokens of a tile for any g <= 0.

    The blocks of 1, 2, 4 and 8 tokens left of the diagonal have borders like the larger
    ones. A token is a row if its block comes second and a column if it comes first, so
    that one exponent serves both roles.
    """
    at, upto = np.arange(TILE), np.tri(TILE, dtype=bool)
    stretches = []
    for size in _SIZES:
        block = at // size
        is_row = block[:, None] % 2 == 1
        inside = block[None] == block[:, None]
        stretches.append(inside & np.where(is_row, upto, ~upto))
    return stretches


def _sums(stretches: Array | np.ndarray, g_SLK: Array) -> Array:
    ones = jnp.asarray(stretches, g_SLK.dtype)
    return jnp.matmul(ones, g_SLK, precision=jax.lax.Precision.HIGHEST)


def _diagonal_tiles(
    q_SLK: Array, k_SLK: Array, pairs: list[Pairs], precision: jax.lax.Precision
) -> tuple[Array, Array]:
    """Returns the 16 x 16 tiles of M and P on the diagonal.

    The diagonal of P holds no decay. Adding it apart keeps its gradient from meeting
    the decay, where it would have to cancel.
    """
    m = p = jnp.zeros((TILE, TILE), q_SLK.dtype)
    for to_row, from_col, mask_LL in pairs:
        row, col = jnp.exp(to_row), k_SLK * jnp.exp(from_col)
        m = jnp.where(mask_LL, _outer(k_SLK * row, col, precision), m)
        p = jnp.where(mask_LL, _outer(q_SLK * row, col, precision), p)
    own = jnp.sum(q_SLK * k_SLK, axis=-1)
    return m, jnp.where(np.eye(TILE, dtype=bool), own[..., None], p)


def _between_neighbours(size: int) -> np.ndarray:
    """Mask of pairs in a tile whose row block follows its column block as a couple."""
    block = np.arange(TILE) // size
    return (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)


def _outer(row: Array, col: Array, precision: jax.lax.Precision) -> Array:
    return jnp.einsum("...ik,...jk->...ij", row, col, precision=precision)


def _blocks(x: Array, size: int) -> Array:
    """[..., L, K] -> [..., S, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _halves(x: Array) -> tuple[Array, Array]:
    """[..., S, L, K] -> even blocks and odd blocks, [..., S/2, L, K] each."""
    x = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(even: Array, odd: Array) -> Array:
    """[..., S/2, L, K] twice -> [..., S/2, 2L, K]."""
    return jnp.concatenate([even, odd], axis=-2)


def _merge(x: Array) -> Array:
    """[..., S, L, K] -> [..., S/2, 2L, K]."""
    return x.reshape(*x.shape[:-3], -1, 2 * x.shape[-2], x.shape[-1])


def _grow(x: Array, lower: Array) -> Array:
    """Diagonal blocks [..., S, L, L] and blocks left of them -> [..., S/2, 2L, 2L]."""
    even, odd = _halves(x)
    top = jnp.concatenate([even, jnp.zeros_like(even)], axis=-1)
    return _join(top, jnp.concatenate([lower, odd], axis=-1))


def unit_lower_inverse(lower_CC: Array, precision: jax.lax.Precision) -> Array:
    """Inverts I + L for strictly lower triangular L [..., C, C] by block doubling.

    If X holds the inverses of the diagonal blocks of size b, then X - X E X holds those
    of size 2b, with E the blocks of L that join two neighbours. Every step is exact
    and intermediate values stay as small as the result. A power series in L (Neumann)
    needs as many products and loses all digits when keys repeat without decay.
    """
    chunk = lower_CC.shape[-1]
    tiles = _diagonal(lower_CC)
    x = jnp.eye(TILE, dtype=lower_CC.dtype)
    for size in _SIZES:
        between = jnp.where(_between_neighbours(size), tiles, 0.0)
        if size > 1:
            between = _sandwich(x, between, x, precision)
        x = x - between
    while x.shape[-1] < chunk:
        even, odd = _halves(x)
        between = _left_of_diagonal(lower_CC, x.shape[-1])
        x = _grow(x, -_sandwich(odd, between, even, precision))
    return x[..., 0, :, :]


def _diagonal(x_CC: Array) -> Array:
    """[..., C, C] -> its tiles on the diagonal, [..., S, 16, 16]."""
    starts = range(0, x_CC.shape[-1], TILE)
    tiles = [x_CC[..., i : i + TILE, i : i + TILE] for i in starts]
    return jnp.stack(tiles, axis=-3)


def _left_of_diagonal(x_CC: Array, size: int) -> Array:
    """[..., C, C] -> blocks that join two neighbours, [..., C/(2 size), size, size]."""
    starts = range(0, x_CC.shape[-1], 2 * size)
    blocks = [x_CC[..., i + size : i + 2 * size, i : i + size] for i in starts]
    return jnp.stack(blocks, axis=-3)


def _sandwich(
    left: Array, middle: Array, right: Array, precision: jax.lax.Precision
) -> Array:
    inner = jnp.matmul(middle, right, precision=precision)
    return jnp.matmul(left, inner, precision=precision)
