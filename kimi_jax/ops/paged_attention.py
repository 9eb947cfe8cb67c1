"""Softmax attention of new tokens to a past that lies in pages of a shared pool.

A pool holds what keys and values are made of, `P` tokens a page, and each row of the
batch names its pages in order, so that rows share the pages of a common prefix. A tile
of a few pages is fetched at a time, expanded into keys and values, and joins an online
softmax: memory depends on neither the length of the past nor the size of the pool, and
time on the longest past that there is.

With the pool split over a mesh axis of X devices, page i of a row lies on device
i mod X. Each device reads its own pages and the partial softmaxes are merged.

Letters: B rows, T new tokens, N pages of this device, P tokens of a page, M pages of a
row, L of them on this device. For inference: no gradient is defined.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.attention_blocks import (
    block_and_padding,
    blocks_of,
    heads,
    join,
    rows_of,
    tile,
)

# Tokens of a tile times its queries: a few queries read long tiles, which keeps the
# number of sequential steps of decoding low.
_TILE_TOKENS = 2048


class Where(NamedTuple):
    """Where new tokens stand, and where the pages of their rows lie."""

    table_BM: Array  # int32, pages in order, counted on the device that holds them
    start_B: Array  # int32, tokens before the new ones
    count_B: Array  # int32, new tokens; the rest of T is padding


def write_pages(
    pool: Array, at: Sequence[Array], new_BT: Array, where: Where, axis: str | None
) -> Array:
    """`pool` with the new tokens of each row written to its pages; padding is not.

    Args:
      pool: [*lead, N, P, ...].
      at: an index for each leading axis, traced or not.
      new_BT: [B, T, ...], cast to the dtype of the pool.
      axis: mesh axis that pages are split over, inside `jax.shard_map`; None: none.
    """
    N, P = pool.shape[len(at) : len(at) + 2]
    X, rank = _ranks(axis)
    t_T = jnp.arange(new_BT.shape[1], dtype=jnp.int32)
    index_BT = where.start_B[:, None] + t_T
    column_BT = index_BT // P
    page_BT = jnp.take_along_axis(where.table_BM, column_BT, axis=1, mode="clip")
    ours_BT = (t_T < where.count_B[:, None]) & (column_BT % X == rank)
    # What lies outside the pool is dropped.
    page_BT = jnp.where(ours_BT, page_BT, N)
    return pool.at[(*at, page_BT, index_BT % P)].set(
        new_BT.astype(pool.dtype), mode="drop"
    )


def paged_attention(
    q_BTHK: Array,
    pools: Sequence[Array],
    at: Sequence[Array],
    where: Where,
    expand: Callable[[Sequence[Array]], tuple[Array, Array]],
    *,
    scale: float,
    block_size: int,
    axis: str | None = None,
) -> Array:
    """softmax(scale q k^T) v over all tokens of the row up to the query's own.

    Args:
      q_BTHK: queries of the new tokens, whose own latents are written already.
      pools: [*lead, N, P, ...] each.
      at: an index for each leading axis.
      expand: latents [B, C, ...] of each pool -> k [B, C, G, K], v [B, C, G, V].
      scale: factor on the scores.
      block_size: largest number of queries in a tile.
      axis: see `write_pages`.

    Returns:
      [B, T, H, V] in float32 or wider; of no meaning at padding.
    """
    T, H = q_BTHK.shape[1:3]
    read = _Reader(pools, at, where, axis)
    keys = max(1, _TILE_TOKENS // min(T, block_size))
    pages = max(1, max(keys, block_size) // read.page_size)
    shapes = jax.eval_shape(lambda: expand(read(0, pages)[0]))
    G, V = shapes[1].shape[2:]
    C, padding = block_and_padding(T, block_size)
    q_BTHK = jnp.pad(q_BTHK, [(0, 0), (0, padding), (0, 0), (0, 0)])
    last_BT = where.start_B[:, None] + jnp.arange(T + padding, dtype=jnp.int32)
    blocks = blocks_of(rows_of(q_BTHK, G, None, last_BT), (T + padding) // C)

    def step(j: Array, pieces_N: Any) -> Any:
        latents, index_C = read(j, pages)
        k_BCGK, v_BCGV = expand(latents)

        def one(block: Any) -> Any:
            rows, pieces = block
            return tile(rows, k_BCGK, v_BCGV, index_C, scale, pieces)

        if C >= T:
            return jax.tree.map(
                lambda x: x[None], one(jax.tree.map(lambda x: x[0], (blocks, pieces_N)))
            )
        return lax.map(one, (blocks, pieces_N))

    pieces_N = lax.fori_loop(0, read.tiles(pages), step, _no_pieces(blocks, V))
    o_BRGV = join(jax.vmap(lambda pieces: _finish(pieces, axis))(pieces_N))
    return heads(o_BRGV, H)[:, :T]


class _Reader:
    """Fetches tiles of `pages` pages of every row, and says which tokens they hold."""

    def __init__(
        self, pools: Sequence[Array], at: Sequence[Array], where: Where, axis: Any
    ):
        self._pools, self._at = pools, tuple(at)
        self._ranks, self._rank = _ranks(axis)
        self.page_size = pools[0].shape[len(at) + 1]
        self._end_B = where.start_B + where.count_B
        B, M = where.table_BM.shape
        table = jnp.pad(where.table_BM, [(0, 0), (0, -M % self._ranks)])
        table = table.reshape(B, -1, self._ranks)
        self._table_BL = lax.dynamic_index_in_dim(table, self._rank, 2, keepdims=False)

    def tiles(self, pages: int) -> Array:
        """How many tiles hold all tokens that there are."""
        columns = -(-jnp.max(self._end_B) // self.page_size)
        return -(-columns // (self._ranks * pages))

    def __call__(self, j: Array | int, pages: int) -> tuple[list[Array], Array]:
        """Latents [B, C, ...] of tile `j`, 0 past the end of a row, and index_C."""
        P = self.page_size
        column_p = j * pages + jnp.arange(pages, dtype=jnp.int32)
        pages_Bp = jnp.take(self._table_BL, column_p, axis=1, mode="clip")
        first_p1 = (column_p * self._ranks + self._rank)[:, None] * P
        index_C = (first_p1 + jnp.arange(P, dtype=jnp.int32)).reshape(-1)
        # A page may hold what a former owner left, and 0 * nan is nan.
        there_BC = index_C < self._end_B[:, None]

        def fetch(pool: Array) -> Array:
            x = pool.at[(*self._at, pages_Bp)].get(mode="clip")
            x_BC = x.reshape(x.shape[0], -1, *x.shape[3:])
            there = there_BC.reshape(there_BC.shape + (1,) * (x_BC.ndim - 2))
            return jnp.where(there, x_BC, 0)

        return [fetch(pool) for pool in self._pools], index_C


def _ranks(axis: str | None) -> tuple[int, Array | int]:
    return (1, 0) if axis is None else (lax.axis_size(axis), lax.axis_index(axis))


def _no_pieces(blocks: Any, V: int) -> tuple[Array, Array, Array]:
    """Of no tile: a finite maximum, so that a tile may hide all its keys from a row."""
    N, B, r, G, _ = blocks.q_BRGK.shape
    wide = jnp.promote_types(blocks.q_BRGK.dtype, jnp.float32)
    low = jnp.full((N, B, G, r), jnp.finfo(wide).min / 2, wide)
    return low, jnp.zeros_like(low), jnp.zeros((N, B, G, r, V), wide)


def _finish(pieces: tuple[Array, Array, Array], axis: str | None) -> Array:
    """[B, r, G, V], over the tiles of all devices of the axis."""
    max_BGR, sum_BGR, o_BGRV = pieces
    if axis is not None:
        shrink_BGR = jnp.exp(max_BGR - lax.pmax(max_BGR, axis))
        sum_BGR = lax.psum(sum_BGR * shrink_BGR, axis)
        o_BGRV = lax.psum(o_BGRV * shrink_BGR[..., None], axis)
    sum_BGR = jnp.where(sum_BGR == 0, 1, sum_BGR)  # rows without any token
    return jnp.moveaxis(o_BGRV / sum_BGR[..., None], 2, 1)
