"""Packed documents: which tokens share a state, and where the state starts anew.

`segment_ids_BT` marks padding with 0 and documents with positive ids. Padding carries
the state through untouched and never separates two runs of one id. Documents are
handled inside chunks by masks, so no token moves and no document is padded to a chunk
border.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.ranks import state_passes

Array = jax.Array


class Runs(NamedTuple):
    """Documents of each row.

      real_BT: bool, False for padding.
      starts_BT: bool, True at a token that starts from a zero state. The first document
        of a row does not: it continues from `initial_state`.
      run_BT: int32, index of the document whose state is live after the token, counted
        from 0; padding before the first document counts as 0.
    passes_RB: with time split over R ranks, `ranks.state_passes`.
    """

    real_BT: Array
    starts_BT: Array
    run_BT: Array
    passes_RB: Array | None = None


class ChunkMasks(NamedTuple):
    """Runs seen from a chunk of C tokens; shapes broadcast over heads.

    same_NB1CC: both tokens belong to one run.
    enters_NB1C1: the token belongs to the run whose state enters the chunk.
    leaves_NB1C1: the token belongs to the run whose state leaves the chunk.
    passes_NB11: the run that enters also leaves.
    """

    same_NB1CC: Array
    enters_NB1C1: Array
    leaves_NB1C1: Array
    passes_NB11: Array


def find_runs(segment_ids_BT: Array, axis: str | None = None) -> Runs:
    """Splits every row into runs of equal non-zero ids, looking through padding.

    With `axis` the tokens are this rank's piece of time, see `ranks`.
    """
    real_BT = segment_ids_BT != 0
    # The last real token so far; a scan of ids would be a few dozen kernels on a GPU.
    token_BT = jnp.where(real_BT, jnp.arange(segment_ids_BT.shape[1]), -1)
    last_BT = jax.lax.cummax(token_BT, axis=1)
    id_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(last_BT, 0), axis=1)
    live_BT = jnp.where(last_BT < 0, 0, id_BT)
    before_BT = jnp.pad(live_BT, ((0, 0), (1, 0)))[:, :-1]
    starts_BT = (before_BT != 0) & (live_BT != before_BT)
    run_BT = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)
    passes_RB = None if axis is None else state_passes(segment_ids_BT, axis)
    return Runs(real_BT, starts_BT, run_BT, passes_RB)


def chunk_masks(run_BT: Array, chunk: int) -> ChunkMasks:
    """Returns the masks of all chunks; what fills up the last one joins its run."""
    batch, time = run_BT.shape
    run_BT = jnp.pad(run_BT, ((0, 0), (0, -time % chunk)), mode="edge")
    run_NBC = jnp.moveaxis(run_BT.reshape(batch, -1, chunk), 1, 0)
    leaves_NB = run_NBC[:, :, -1]
    enters_NB = jnp.pad(leaves_NB, ((1, 0), (0, 0)))[:-1]
    return ChunkMasks(
        same_NB1CC=(run_NBC[..., :, None] == run_NBC[..., None, :])[:, :, None],
        enters_NB1C1=(run_NBC == enters_NB[..., None])[:, :, None, :, None],
        leaves_NB1C1=(run_NBC == leaves_NB[..., None])[:, :, None, :, None],
        passes_NB11=(enters_NB == leaves_NB)[..., None, None],
    )
