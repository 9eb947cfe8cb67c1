"""Where documents begin and end inside packed rows.

`segment_ids_BT` is int32 with 0 for padding and a positive id for a document; a
document is a run of equal ids, so an id that comes back after a gap names a new
document. Every operation that looks back in time asks this file how far it may.
"""

import jax.numpy as jnp
from jax import Array, lax


def document_starts(segment_ids_BT: Array) -> Array:
    """Index of the first token of each token's document.

    Token t may look at the tokens `start <= s <= t` and at no others. Padding gets
    the start T, which no s reaches, so that it looks at nothing.

    Args:
      segment_ids_BT: int [B, T].

    Returns:
      int32 [B, T].
    """
    check_segment_ids(segment_ids_BT)
    T = segment_ids_BT.shape[1]
    t_T = jnp.arange(T, dtype=jnp.int32)
    changed_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    begins_BT = jnp.pad(changed_BT, ((0, 0), (1, 0)), constant_values=True)
    start_BT = lax.cummax(jnp.where(begins_BT, t_T, 0), axis=1)
    return jnp.where(segment_ids_BT > 0, start_BT, T)


def positions_in_segments(segment_ids_BT: Array) -> Array:
    """Position of each token in its own document: int32 [B, T], 0 at padding."""
    start_BT = document_starts(segment_ids_BT)
    t_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    return jnp.maximum(t_T - start_BT, 0)


def check_segment_ids(
    segment_ids_BT: Array, shape_BT: tuple[int, ...] | None = None
) -> None:
    """Raises ValueError unless the ids are integers [B, T], of shape `shape_BT`."""
    shape = segment_ids_BT.shape
    if len(shape) != 2 or shape_BT not in (None, shape):
        wanted = "" if shape_BT is None else f" = {shape_BT}"
        raise ValueError(
            f"segment_ids_BT has shape {shape}, expected [B, T]{wanted}; pass one id "
            "per token, 0 for padding"
        )
    if not jnp.issubdtype(segment_ids_BT.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids_BT has dtype {segment_ids_BT.dtype}, expected an integer "
            "type; pass int32 ids, 0 for padding"
        )
