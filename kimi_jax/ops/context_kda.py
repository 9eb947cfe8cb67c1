"""KDA with time split over a mesh axis: one local pass, one exchange of summaries.

The recurrence is affine in the state. A piece with entry state S turns it into
M S + S0, and its outputs are o_t = o0_t + S^T r_t, where (o0, S0) belong to a zero
entry state. The columns of the state do not mix, so one call of `kda` gives all four:
V columns start from zero, K more carry no values and start from the identity.

All ranks gather all (M, S0), 4 K (K + V) bytes a head and rank, and fold those before
theirs. Gradients take the same way back: the gather's transpose is a reduce-scatter.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.context import from_rank, state_passes, vary_like
from pallas_kernels.kda import kda
from pallas_kernels.kda.checks import check_arrays
from pallas_kernels.kda.gates import Inputs, accumulation_dtype


def context_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    axis: str,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    output_final_state: bool = False,
    share_final_state: bool = True,
    **settings: Any,
) -> tuple[Array, Array | None]:
    """`pallas_kernels.kda.kda` on this rank's piece of time, inside `jax.shard_map`.

    The local pass works on V + K value columns instead of V. These are float32 (float64
    if v is), so that o is rounded to v's dtype only once.

    Args:
      q, k, v, g, beta, segment_ids: as in `kda`, this rank's T tokens.
      axis: name of the mesh axis, contiguous pieces of equal length, rank 0 first.
      A_log, dt_bias: as in `kda`, equal on all ranks.
      initial_state: [B,HV,K,V] before the first token of rank 0, equal on all ranks.
      output_final_state: also return the state after the last rank's last token.
      share_final_state: on all ranks, which costs one more sum of 4 K V bytes a head.
        Without, each rank gets the state after its own last token.
      **settings: the other settings of `kda`.

    Returns:
      o [B,T,HV,V] in v's dtype; the final state [B,HV,K,V], or None.

    Raises:
      ValueError: what `kda` raises.
    """
    given = Inputs(q, k, v, g, beta, A_log, dt_bias)
    check_arrays(given, initial_state, segment_ids, lead=("B", "T"))
    # The local scan may only start from a state that varies as all it meets.
    starts_BHKX = vary_like(_two_starts(given), *given, initial_state)
    wide_v = _with_empty_columns(v, q.shape[-1])
    settings |= {"A_log": A_log, "dt_bias": dt_bias, "segment_ids": segment_ids}
    settings |= {"initial_state": starts_BHKX, "output_final_state": True}
    o_BTHX, end_BHKX = kda(q, k, wide_v, g, beta, **settings)
    assert end_BHKX is not None  # it was asked for
    start_BHKV = starts_BHKX[..., : v.shape[-1]]  # zeros
    if initial_state is not None:
        start_BHKV = vary_like(initial_state, starts_BHKX)
    passes_RB = None if segment_ids is None else state_passes(segment_ids, axis)
    entry_BHKV = _entry_state(end_BHKX, start_BHKV, passes_RB, axis)
    o_BTHV = _read(o_BTHX, entry_BHKV, q.dtype).astype(v.dtype)
    if not output_final_state:
        return o_BTHV, None
    state_BHKV = _through(end_BHKX, entry_BHKV)
    if share_final_state:
        state_BHKV = from_rank(state_BHKV, lax.axis_size(axis) - 1, axis)
    return o_BTHV, state_BHKV


def _two_starts(given: Inputs) -> Array:
    """[0 | I]: the entry states of all value columns, [B,HV,K,V+K]."""
    B, _, H, V = given.v.shape
    K = given.q.shape[-1]
    dtype = accumulation_dtype(*given[:5])
    return jnp.broadcast_to(jnp.eye(K, V + K, V, dtype), (B, H, K, V + K))


def _with_empty_columns(v_BTHV: Array, count: int) -> Array:
    wide = jnp.promote_types(v_BTHV.dtype, jnp.float32)
    return jnp.pad(v_BTHV.astype(wide), [(0, 0)] * 3 + [(0, count)])


def _entry_state(end_BHKX, start_BHKV, passes_RB, axis):
    """The state that this rank's first document starts from."""
    all_RBHKX = lax.all_gather(end_BHKX, axis)
    if passes_RB is None:
        passes_RB = jnp.ones(all_RBHKX.shape[:2], bool)

    def step(state_BHKV, rank):
        end_BHKX, passes_B = rank
        state_BHKV = jnp.where(passes_B[:, None, None, None], state_BHKV, 0.0)
        return _through(end_BHKX, state_BHKV), state_BHKV

    _, entry_RBHKV = lax.scan(step, start_BHKV, (all_RBHKX, passes_RB))
    return lax.dynamic_index_in_dim(entry_RBHKV, lax.axis_index(axis), keepdims=False)


def _read(o_BTHX, entry_BHKV, dtype):
    """The outputs, from [o0 | r] and the entry state."""
    o0_BTHV, r_BTHK = jnp.split(o_BTHX, [entry_BHKV.shape[-1]], axis=-1)
    # As `kda`: accelerators may round products of bfloat16 inputs alone.
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return o0_BTHV + jnp.einsum(
        "bthk,bhkv->bthv", r_BTHK, entry_BHKV, precision=precision
    )


def _through(end_BHKX: Array, state_BHKV: Array) -> Array:
    """The state after a piece, from its end [S0 | M] and the state before it."""
    V = state_BHKV.shape[-1]
    moved_BHKV = jnp.einsum(
        "bhkj,bhjv->bhkv",
        end_BHKX[..., V:],
        state_BHKV,
        precision=lax.Precision.HIGHEST,
    )
    return end_BHKX[..., :V] + moved_BHKV
