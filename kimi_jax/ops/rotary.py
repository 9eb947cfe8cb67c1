"""Rotary positions, used only by the ablation `positions='rope'`.

K3's attention rotates nothing (NoPE): order reaches it through the KDA layers. The
layout here is half-split: channel i turns together with channel i + R/2. Positions
restart at each packed document, so a document does not feel its place in the row.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from kimi_jax.ops.segments import positions_in_segments

__all__ = ["positions_in_segments", "rotate", "rotate_pair", "rotate_pair_from"]


def rotate_pair(
    q_BTHR: Array, k_BTGR: Array, segment_ids_BT: Array | None, base: float
) -> tuple[Array, Array]:
    """`rotate` of queries and keys, by positions that restart at each document.

    None for segment_ids_BT means one document a row, without padding.
    """
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(q_BTHR.shape[:2], jnp.int32)
    positions_BT = positions_in_segments(segment_ids_BT)
    return rotate(q_BTHR, positions_BT, base), rotate(k_BTGR, positions_BT, base)


def rotate_pair_from(
    q_BTHR: Array, k_BTGR: Array, start_B: Array, base: float
) -> tuple[Array, Array]:
    """`rotate` of the queries and keys of T tokens a row, the first at `start_B`."""
    positions_BT = start_B[:, None] + jnp.arange(q_BTHR.shape[1], dtype=jnp.int32)
    return rotate(q_BTHR, positions_BT, base), rotate(k_BTGR, positions_BT, base)


def rotate(x_BTHR: Array, positions_BT: Array, base: float) -> Array:
    """Turns channel pair (i, i + R/2) by the angle position * base^(-2i/R).

    Scores of two rotated vectors depend only on the difference of their positions.
    Angles are float32 or wider: their error grows as 1e-7 times the position, in
    radians.

    Args:
      x_BTHR: [B, T, H, R], R even.
      positions_BT: [B, T], see `positions_in_segments`.
      base: the slowest pair turns once in about 2 pi base tokens.

    Returns:
      [B, T, H, R] in x's dtype.

    Raises:
      ValueError: R is odd, or the shapes do not match.
    """
    R = x_BTHR.shape[-1]
    if R % 2:
        raise ValueError(
            f"rotary width is {R}, expected an even number; channels turn in pairs"
        )
    if x_BTHR.ndim != 4 or positions_BT.shape != x_BTHR.shape[:2]:
        raise ValueError(
            f"x has shape {x_BTHR.shape} and positions {positions_BT.shape}, expected "
            "[B, T, H, R] and [B, T]"
        )
    dtype = jnp.promote_types(x_BTHR.dtype, jnp.float32)
    rate_P = jnp.asarray(float(base) ** (-np.arange(0, R, 2) / R), dtype)
    angle_BT1P = positions_BT[:, :, None, None].astype(dtype) * rate_P
    cos_BT1P, sin_BT1P = jnp.cos(angle_BT1P), jnp.sin(angle_BT1P)
    a_BTHP, b_BTHP = jnp.split(x_BTHR.astype(dtype), 2, axis=-1)
    turned = [a_BTHP * cos_BT1P - b_BTHP * sin_BT1P]
    turned += [a_BTHP * sin_BT1P + b_BTHP * cos_BT1P]
    return jnp.concatenate(turned, axis=-1).astype(x_BTHR.dtype)
