"""Time split over a mesh axis, or over segments of a row: states across the borders.

The recurrence is affine in the state. What a piece does to any state S that enters it,
S -> Phi S + Psi, is its summary [Psi | Phi], [..., K, V+K]; gradients of states run
through the transpose, in the other direction. Ranks are contiguous pieces of equal
length, rank 0 first; `axis` is the mesh axis, inside `jax.shard_map`.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def through(summary_BHKW: Array, state_BHKX: Array) -> Array:
    """The state after a piece, from its summary and the state before it.

    Psi goes to the first V columns; what follows them, if anything, starts from zero.
    """
    K, W = summary_BHKW.shape[-2:]
    psi, phi = summary_BHKW[..., : W - K], summary_BHKW[..., W - K :]
    missing = state_BHKX.shape[-1] - psi.shape[-1]
    psi = jnp.pad(psi, [(0, 0)] * (psi.ndim - 1) + [(0, missing)])
    return jnp.matmul(phi, state_BHKX, precision=lax.Precision.HIGHEST) + psi


def whole(summaries_SBHKW: Array, first_BHKV: Array) -> Array:
    """The summary of consecutive pieces, whose Psi starts from `first` and not zero."""
    identity = jnp.broadcast_to(
        jnp.eye(first_BHKV.shape[-2], dtype=first_BHKV.dtype),
        (*first_BHKV.shape[:-1], first_BHKV.shape[-2]),
    )
    wide = jnp.concatenate([first_BHKV, identity], axis=-1)
    after = through(summaries_SBHKW[0], wide)
    return lax.scan(lambda s, x: (through(x, s), None), after, summaries_SBHKW[1:])[0]


def exchange(
    summary_BHKW: Array,
    start_BHKV: Array,
    passes_RB: Array | None,
    axis: str,
    *,
    reverse: bool = False,
) -> Array:
    """The state that enters this rank's piece.

    Every rank gathers all summaries and folds those before its own, or after it.

    Args:
      summary_BHKW: of this rank's piece.
      start_BHKV: what enters the first piece; varies over the mesh as the summary does.
      passes_RB: see `state_passes`; None lets every state pass.
      reverse: gradients of states, which enter at the end of a piece; the first piece
        is that of the last rank.
    """
    all_RBHKW = lax.all_gather(summary_BHKW, axis)
    if passes_RB is None:
        passes_RB = jnp.ones(all_RBHKW.shape[:2], bool)
    if reverse:  # into rank r from rank r + 1
        passes_RB = jnp.roll(passes_RB, -1, axis=0)

    def step(state_BHKV, rank):
        summary_BHKW, passes_B = rank
        state_BHKV = jnp.where(passes_B[:, None, None, None], state_BHKV, 0.0)
        return through(summary_BHKW, state_BHKV), state_BHKV

    xs = all_RBHKW, passes_RB
    _, entry_RBHKV = lax.scan(step, start_BHKV, xs, reverse=reverse)
    return lax.dynamic_index_in_dim(entry_RBHKV, lax.axis_index(axis), keepdims=False)


def state_passes(segment_ids_BT: Array, axis: str) -> Array:
    """Whether the state before each rank's piece reaches the piece's first document.

    Padding carries the state and never ends a document, and the first document of a row
    takes the state it is given. A rank with padding alone lets the state through.
    Gathers two ids per row.

    Returns:
      bool [R, B], equal on all ranks.
    """
    real_BT = segment_ids_BT != 0
    first_B1 = jnp.argmax(real_BT, axis=1, keepdims=True)
    last_B1 = real_BT.shape[1] - 1 - jnp.argmax(real_BT[:, ::-1], 1, keepdims=True)
    ends_B2 = jnp.concatenate([first_B1, last_B1], axis=1)
    ends_B2 = jnp.take_along_axis(segment_ids_BT, ends_B2, axis=1)
    first_RB, last_RB = jnp.moveaxis(lax.all_gather(ends_B2, axis), 2, 0)
    live_RB = lax.associative_scan(lambda a, b: jnp.where(b == 0, a, b), last_RB)
    before_RB = jnp.pad(live_RB, ((1, 0), (0, 0)))[:-1]
    return (before_RB == 0) | (first_RB == 0) | (first_RB == before_RB)
