"""The short convolution with time split over a mesh axis: a halo of W - 1 inputs.

Each rank puts the W - 1 inputs (and ids) before its piece in front of it, convolves,
and drops as many outputs. Documents then continue over borders, or end there, by the
rule of the plain convolution.
"""

import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.context import from_rank, previous_tokens, vary_like
from kimi_jax.ops.conv import check_inputs, short_conv


def context_short_conv(
    x_BTC: Array,
    w_CW: Array,
    segment_ids_BT: Array | None = None,
    initial_tail: Array | None = None,
    output_tail: bool = False,
    *,
    axis: str,
) -> Array | tuple[Array, Array]:
    """`short_conv` on this rank's piece of time, inside `jax.shard_map`.

    Sends W - 1 inputs to the next rank; where a piece is shorter, its own T inputs to
    each of the next (W - 1) / T ranks.

    Args:
      x_BTC, segment_ids_BT: as in `short_conv`, this rank's T >= 1 tokens.
      w_CW: as in `short_conv`, equal on all ranks.
      initial_tail: [B, W-1, *C] before the first document of each row, wherever that
        begins, equal on all ranks.
      output_tail: also return the tail that continues the last document of each row.
      axis: name of the mesh axis, contiguous pieces of equal length, rank 0 first.

    Returns:
      y [B, T, *C] in x's dtype, 0 at padding; with output_tail also the tail
      [B, W-1, *C], equal on all ranks.

    Raises:
      ValueError: what `short_conv` raises.
    """
    check_inputs(x_BTC, w_CW, segment_ids_BT, initial_tail)
    reach = w_CW.shape[-1] - 1
    ids_BT, tail = segment_ids_BT, initial_tail
    if tail is not None and ids_BT is None:
        # Ids tell the tail's place from the zeros before the first token of all.
        ids_BT = vary_like(jnp.ones(x_BTC.shape[:2], jnp.int32), x_BTC)
    x_BSC = _with_halo(x_BTC, reach, axis)
    ids_BS = None if ids_BT is None else _with_halo(ids_BT, reach, axis)
    if tail is not None:
        began_B = _first_token(ids_BT, axis) < _offset(x_BTC, axis) - reach
        began_B = began_B.reshape((-1,) + (1,) * (tail.ndim - 1))
        tail = jnp.where(began_B, 0, vary_like(tail, x_BSC))
    y_BSC, tail = short_conv(x_BSC, w_CW, ids_BS, tail, output_tail=True)
    y_BTC = y_BSC[:, reach:]
    if not output_tail:
        return y_BTC
    return y_BTC, from_rank(tail, _last_rank(ids_BT, axis), axis)


def _with_halo(x_BT, reach, axis):
    return jnp.concatenate([previous_tokens(x_BT, reach, axis), x_BT], axis=1)


def _offset(x_BT, axis):
    return lax.axis_index(axis) * x_BT.shape[1]


def _first_token(ids_BT, axis):
    """Index of the first real token of each row among the tokens of all ranks."""
    real_BT = ids_BT > 0
    first_B = jnp.argmax(real_BT, axis=1) + _offset(ids_BT, axis)
    end = ids_BT.shape[1] * lax.axis_size(axis)
    return lax.pmin(jnp.where(jnp.any(real_BT, axis=1), first_B, end), axis)


def _last_rank(ids_BT, axis):
    """The last rank with a real token, for each row; rank 0 if all is padding."""
    if ids_BT is None:
        return lax.axis_size(axis) - 1
    real_B = jnp.any(ids_BT > 0, axis=1)
    return lax.pmax(jnp.where(real_B, lax.axis_index(axis), 0), axis)
