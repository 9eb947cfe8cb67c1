"""Causal depthwise short convolution: the few-token mixing in front of KDA.

Each channel is a weighted sum of its own last W tokens. Packed documents do not see
each other and padding is inert. A tail of W - 1 past inputs carries a document over
a cut, for decoding and for sequences processed in parts. Written as W shifted
multiply-adds (W is 4), which XLA fuses into one pass on every backend.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.segments import check_segment_ids, document_starts


def short_conv(
    x_BTC: Array,
    w_CW: Array,
    segment_ids_BT: Array | None = None,
    initial_tail: Array | None = None,
    output_tail: bool = False,
) -> Array | tuple[Array, Array]:
    """y_t = sum_j w[..., W-1-j] * x_(t-j): the last tap is the current token.

    Sums in float32 or wider. No activation and no bias. C stands for any number of
    channel axes, [H, K] in a KDA layer. Source: Kimi Linear report, KDA layer.

    Args:
      x_BTC: [B, T, *C], T >= 1.
      w_CW: [*C, W], W >= 1.
      segment_ids_BT: int [B, T], 0 = padding, or None for one document per row.
      initial_tail: [B, W-1, *C], the inputs just before the first document of each
        row, which that document continues; zeros (or None) if it is a new one. No
        later document sees it.
      output_tail: also return the tail that continues the last document of each row.
        A row that is all padding hands its initial tail on.

    Returns:
      y [B, T, *C] in x's dtype, 0 at padding; with output_tail also the tail
      [B, W-1, *C] in x's dtype.

    Raises:
      ValueError: a shape does not match.
    """
    check_inputs(x_BTC, w_CW, segment_ids_BT, initial_tail)
    y_BTC, tail = _short_conv(x_BTC, w_CW, segment_ids_BT, initial_tail)
    return (y_BTC, tail) if output_tail else y_BTC


# Plain autodiff would keep one masked copy of x per tap.
@jax.checkpoint
def _short_conv(x_BTC, w_CW, segment_ids_BT, initial_tail):
    _, T, *C = x_BTC.shape
    W = w_CW.shape[-1]
    dtype = jnp.promote_types(x_BTC.dtype, jnp.float32)
    w_WC = jnp.moveaxis(w_CW.astype(dtype), -1, 0)
    padded, start_BT, first_B1 = _prepend(x_BTC, W - 1, segment_ids_BT, initial_tail)

    y_BTC = jnp.zeros((), dtype)
    for back in range(W):
        tap_BTC = lax.slice_in_dim(padded, W - 1 - back, W - 1 - back + T, axis=1)
        if start_BT is not None:
            own_BT = _own(jnp.arange(T) - back, start_BT, first_B1)
            tap_BTC = jnp.where(_over_channels(own_BT, C), tap_BTC, 0)
        y_BTC += tap_BTC.astype(dtype) * w_WC[W - 1 - back]
    return y_BTC.astype(x_BTC.dtype), _tail(padded, T, start_BT, first_B1)


def _prepend(x_BTC, reach, segment_ids_BT, initial_tail):
    """Puts `reach` past inputs before x: ([B, reach+T, *C], starts, first start)."""
    B, _, *C = x_BTC.shape
    tail = initial_tail
    if tail is None:
        tail = jnp.zeros((B, reach, *C), x_BTC.dtype)
    tail = tail.astype(x_BTC.dtype)
    if segment_ids_BT is None:
        return jnp.concatenate([tail, x_BTC], axis=1), None, None
    real_BT = segment_ids_BT > 0
    x_BTC = jnp.where(_over_channels(real_BT, C), x_BTC, 0)
    first_B = jnp.argmax(real_BT, axis=1).astype(jnp.int32)
    padded = jnp.pad(x_BTC, [(0, 0), (reach, 0)] + [(0, 0)] * len(C))
    if initial_tail is not None:
        # Padding may come first: the tail belongs right before the first document.
        padded = jax.vmap(_write_rows)(padded, tail, first_B)
    return padded, document_starts(segment_ids_BT), first_B[:, None]


def _tail(padded, T, start_BT, first_B1):
    """The last inputs of the last document of each row: [B, W-1, *C]."""
    reach = padded.shape[1] - T
    if start_BT is None:
        return padded[:, T:]
    t_T = jnp.arange(T)
    last_B1 = jnp.max(jnp.where(start_BT <= t_T, t_T, -1), axis=1, keepdims=True)
    start_B1 = jnp.take_along_axis(start_BT, jnp.maximum(last_B1, 0), axis=1)
    start_B1 = jnp.where(last_B1 < 0, first_B1, start_B1)
    rows = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, reach))
    tail = rows(padded, last_B1[:, 0] + 1)
    s = last_B1 + 1 - reach + jnp.arange(reach)
    own = _own(s, start_B1, first_B1)
    return jnp.where(_over_channels(own, padded.shape[2:]), tail, 0)


def _own(s_BT, start_BT, first_B1):
    """Whether input s belongs to the document: the first one also owns the tail."""
    return (s_BT >= start_BT) | (start_BT == first_B1)


def _write_rows(row, tail, at):
    return lax.dynamic_update_slice_in_dim(row, tail, at, axis=0)


def _over_channels(mask_BT, C):
    return mask_BT.reshape(mask_BT.shape + (1,) * len(C))


def check_inputs(
    x_BTC: Array,
    w_CW: Array,
    segment_ids_BT: Array | None,
    initial_tail: Array | None,
) -> None:
    """Raises ValueError unless the shapes fit together, see `short_conv`."""
    B, _, *C = x_BTC.shape
    if w_CW.ndim < 1 or tuple(w_CW.shape[:-1]) != tuple(C):
        raise ValueError(
            f"w has shape {w_CW.shape}, expected [*C, W] with C = {tuple(C)} from x of "
            f"shape {x_BTC.shape}; give every channel its own W taps"
        )
    if segment_ids_BT is not None:
        check_segment_ids(segment_ids_BT, x_BTC.shape[:2])
    tail_shape = (B, w_CW.shape[-1] - 1, *C)
    if initial_tail is not None and initial_tail.shape != tail_shape:
        raise ValueError(
            f"initial_tail has shape {initial_tail.shape}, expected [B, W-1, *C] = "
            f"{tail_shape}; pass the tail that the previous call returned"
        )
