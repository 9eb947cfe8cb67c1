"""The vision tower's arithmetic: where patches are, and how they become tokens.

A row of the batch holds the patches of its images and clips one item after the other,
then padding: [B, P]. An item is a grid of t frames of h x w patches, in the order
(t, y, x). `grids_BI3` alone says how a row is divided; everything else is computed from
it here, so that shapes are static and only pixels and grids travel.

Sources: Kimi K3 report Sec. 2.4 and the released modelling code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Places(NamedTuple):
    """Where each patch is: int32 [B, P] each; padding is at 0 of a grid of one."""

    item_BP: Array  # counted from 1 within the row; 0: padding
    t_BP: Array
    y_BP: Array
    x_BP: Array
    frames_BP: Array  # of its item
    height_BP: Array
    width_BP: Array
    merged_BP: Array  # the merged patch of the row that it joins; P at padding


def locate(grids_BI3: Array, patches: int, merge: int) -> Places:
    """The places of `patches` patches a row.

    Args:
      grids_BI3: int [B, I, 3], (t, h, w) of each item in patches, h and w multiples of
        `merge`; zeros: no item. They must not hold more than `patches` together.
      patches: P.
      merge: side of the squares that become one token.
    """
    size_BI = jnp.prod(grids_BI3, axis=-1)
    merged_BI = grids_BI3[..., 1] * grids_BI3[..., 2] // merge**2
    end_BI = jnp.cumsum(size_BI, axis=1)
    p_P = jnp.arange(patches, dtype=jnp.int32)
    index_BP = jnp.sum(p_P[:, None] >= end_BI[:, None, :], axis=-1)
    real_BP = p_P < end_BI[:, -1:]
    index_BP = jnp.where(real_BP, index_BP, 0)

    def of_item(x_BI: Array) -> Array:
        return jnp.take_along_axis(x_BI, index_BP, axis=1)

    frames, height, width = (
        jnp.where(real_BP, of_item(grids_BI3[..., i]), 1) for i in range(3)
    )
    offset_BP = jnp.where(real_BP, p_P - of_item(end_BI - size_BI), 0)
    t_BP, rest_BP = jnp.divmod(offset_BP, height * width)
    y_BP, x_BP = jnp.divmod(rest_BP, width)
    first_BP = of_item(jnp.cumsum(merged_BI, axis=1) - merged_BI)
    merged_BP = first_BP + (y_BP // merge) * (width // merge) + x_BP // merge
    item_BP = jnp.where(real_BP, index_BP + 1, 0)
    merged_BP = jnp.where(real_BP, merged_BP, patches)
    return Places(item_BP, t_BP, y_BP, x_BP, frames, height, width, merged_BP)


def grid_positions(table_YXD: Array, places: Places) -> Array:
    """The learned grid of positions, resized to each item's grid, at each patch.

    Bilinear between the centres of cells, without anti-aliasing, clamped at the edges
    (torch's `interpolate` with align_corners=False): an item of the table's own size
    gets the table.

    Returns:
      [B, P, D] in the table's dtype.
    """
    rows, columns, _ = table_YXD.shape
    y0_BP, y1_BP, fy_BP = _between(places.y_BP, places.height_BP, rows)
    x0_BP, x1_BP, fx_BP = _between(places.x_BP, places.width_BP, columns)

    def corner(y_BP: Array, x_BP: Array, weight_BP: Array) -> Array:
        return table_YXD[y_BP, x_BP] * weight_BP[..., None].astype(table_YXD.dtype)

    return (
        corner(y0_BP, x0_BP, (1 - fy_BP) * (1 - fx_BP))
        + corner(y0_BP, x1_BP, (1 - fy_BP) * fx_BP)
        + corner(y1_BP, x0_BP, fy_BP * (1 - fx_BP))
        + corner(y1_BP, x1_BP, fy_BP * fx_BP)
    )


def _between(at_BP: Array, size_BP: Array, cells: int) -> tuple[Array, Array, Array]:
    """The two cells that a patch lies between, and the share of the second."""
    centre_BP = (at_BP + 0.5) * (cells / size_BP) - 0.5
    centre_BP = jnp.maximum(centre_BP, 0.0)
    low_BP = jnp.minimum(jnp.floor(centre_BP).astype(jnp.int32), cells - 1)
    high_BP = jnp.minimum(low_BP + 1, cells - 1)
    return low_BP, high_BP, centre_BP - low_BP


def time_code(places: Places, max_frames: int, width: int) -> Array:
    """Sines, then cosines, of a patch's frame number; 0 where an item has one frame.

    Channel i of either half turns by 10000^(-2i / width) radians a frame.

    Returns:
      float32 [B, P, width].
    """
    rate_R = 10000.0 ** (-np.arange(width // 2) / (width // 2))
    angle_FR = np.arange(max_frames)[:, None] * rate_R
    table_FD = np.concatenate([np.sin(angle_FR), np.cos(angle_FR)], axis=1)
    code_BPD = jnp.asarray(table_FD, jnp.float32)[places.t_BP]
    return jnp.where((places.frames_BP > 1)[..., None], code_BPD, 0.0)


def rotate_in_plane(z_BPHK: Array, places: Places, base: float) -> Array:
    """2-D rotary positions: neighbouring channels turn together.

    Pair p, channels (2p, 2p + 1), turns by base^(-4 (p // 2) / K) radians a patch:
    even pairs along x, odd ones along y. Frames do not turn.

    Args:
      z_BPHK: [B, P, H, K], K a multiple of 4.

    Returns:
      [B, P, H, K] in z's dtype; computed in float32 or wider.
    """
    K = z_BPHK.shape[-1]
    dtype = jnp.promote_types(z_BPHK.dtype, jnp.float32)
    rate_R = jnp.asarray(float(base) ** (-np.arange(0, K, 4) / K), dtype)
    at_BP2 = jnp.stack([places.x_BP, places.y_BP], axis=-1).astype(dtype)
    angle_BPR2 = at_BP2[:, :, None, :] * rate_R[:, None]
    angle_BP1K = angle_BPR2.reshape(*at_BP2.shape[:2], 1, K // 2)
    cos, sin = jnp.cos(angle_BP1K), jnp.sin(angle_BP1K)
    pairs = z_BPHK.astype(dtype).reshape(*z_BPHK.shape[:-1], K // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.reshape(z_BPHK.shape).astype(z_BPHK.dtype)


def pool_and_merge(x_BPD: Array, places: Places, merge: int) -> Array:
    """The mean over an item's frames, then squares of patches side by side.

    Returns:
      [B, M, merge^2 D] in x's dtype, M = P / merge^2: the squares of a row in the order
      of items, y, x; inside a square patches in the order y, x. Zeros after the last.
    """
    P, D = x_BPD.shape[1:]
    M = P // merge**2
    inside_BP = (places.y_BP % merge) * merge + places.x_BP % merge
    slot_BP = places.merged_BP * merge**2 + inside_BP  # of padding: beyond the last
    wide = jnp.promote_types(x_BPD.dtype, jnp.float32)
    share_BPD = x_BPD.astype(wide) / places.frames_BP[..., None]

    def gather(share_PD: Array, slot_P: Array) -> Array:
        return jax.ops.segment_sum(share_PD, slot_P, num_segments=M * merge**2)

    pooled = jax.vmap(gather)(share_BPD, slot_BP)
    return pooled.reshape(-1, M, merge**2 * D).astype(x_BPD.dtype)


def put_features(x_BTD: Array, here_BT: Array, features_BMD: Array) -> Array:
    """x with its k-th marked position replaced by feature k, in each row.

    Args:
      here_BT: bool; no row may have more than M marks.
    """
    index_BT = jnp.cumsum(here_BT, axis=1) - 1
    index_BT = jnp.clip(index_BT, 0, features_BMD.shape[1] - 1)
    put_BTD = jnp.take_along_axis(features_BMD, index_BT[..., None], axis=1)
    return jnp.where(here_BT[..., None], put_BTD.astype(x_BTD.dtype), x_BTD)
