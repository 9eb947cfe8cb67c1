"""Rows times the matrix of the group that each row belongs to.

    y_p = x_p @ w_[group of p]

Rows are sorted by group and cut into blocks of equal size that each belong to one group
(blocks of one row: plain sorted rows). Two ways to multiply them:

  blocked  one batched matmul over blocks, each with its own copy of its group's matrix.
           Runs at the speed of a dense matmul where blocks are large, and faster still
           where every group has one block, which needs no copies.
  ragged   `jax.lax.ragged_dot`: no copies and no padding. A TPU has a grouped matmul
           for it; XLA on CPU and GPU multiplies every row by every matrix.

Letters: P rows, B blocks, R = P / B rows of a block, E groups, I and O widths.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops.rows import wide

IMPLEMENTATIONS = ("blocked", "ragged")


class Groups(NamedTuple):
    """Which rows belong to which group."""

    # int32 group of each block, ascending, E - 1 if unused; None = one block each.
    group_B: jax.Array | None
    rows_E: jax.Array  # int32 rows of each group's blocks, unused ones left out


def grouped_matmul(
    x_PI: jax.Array, w_EIO: jax.Array, groups: Groups, *, implementation: str
) -> jax.Array:
    """Multiplies each row by its group's matrix.

    Rows of unused blocks return anything, finite or not: nobody may read them. For
    gradients, rows of padding must get cotangents of 0.

    Args:
      x_PI: rows, sorted by group; padding rows are 0.
      w_EIO: matrices, in the dtype of x.
      groups: the blocks; P must be a multiple of B.
      implementation: 'blocked' or 'ragged'.

    Returns:
      y_PO in the dtype of x.
    """
    P, group_B = x_PI.shape[0], groups.group_B
    blocks = w_EIO.shape[0] if group_B is None else group_B.shape[0]
    if P % blocks:
        raise ValueError(f"{P} rows do not make {blocks} blocks; pad the rows")
    if implementation == "ragged":
        return jax.lax.ragged_dot(x_PI, w_EIO, groups.rows_E)
    if implementation != "blocked":
        raise ValueError(
            f"unknown grouped matmul {implementation!r}; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    x_BRI = x_PI.reshape(blocks, P // blocks, -1)
    w_BIO = w_EIO if group_B is None else _take(w_EIO, group_B)
    y_BRO = jnp.einsum("bri,bio->bro", x_BRI, w_BIO)
    return y_BRO.reshape(P, -1)


def _take(w_EIO, group_B):
    """w_BIO. Through the cast, gradients of a group's blocks add up in float32.

    XLA:GPU needs minutes to compile the gradient if told that the indices are sorted.
    """
    w_BIO = w_EIO.astype(wide(w_EIO)).at[group_B].get(mode="promise_in_bounds")
    return w_BIO.astype(w_EIO.dtype)
