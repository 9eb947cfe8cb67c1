"""KDA with time split over a mesh axis: local passes, one exchange of summaries.

The recurrence is affine in the state. A piece with entry state S turns it into
M S + S0. All ranks gather all (M, S0), 4 K (K + V) bytes a head and rank, and fold
those before theirs.

The Triton kernels find (M, S0) in a pass of their own and then scan from the entry
state; their gradient does the same in reverse. Elsewhere one call of `kda` finds all:
outputs are o_t = o0_t + S^T r_t, where (o0, S0) belong to a zero entry state, and the
columns of the state do not mix, so V columns start from zero, and K more carry no
values and start from the identity. Its gradient needs no code: the gather's transpose
is a reduce-scatter.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.context import from_rank, vary_like
from pallas_kernels.kda import choose_implementation, kda, ranks, target
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

    Where there are no Triton kernels, the local pass works on V + K value columns, in
    float32 (float64 if v is), so that o is rounded to v's dtype only once.

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
    # Scans may only start from a state that varies as all they meet.
    starts_BHKX = vary_like(_two_starts(given), *given, initial_state)
    start_BHKV = starts_BHKX[..., : v.shape[-1]]  # zeros
    if initial_state is not None:
        start_BHKV = vary_like(initial_state, starts_BHKX)
    settings |= {"segment_ids": segment_ids, "output_final_state": True}
    asked = settings.get("implementation")
    if choose_implementation(asked, target.platform(), given)[0] == "triton":
        settings |= {"initial_state": start_BHKV, "axis": axis}
        o_BTHV, state_BHKV = kda(**given._asdict(), **settings)
    else:
        wide = given._replace(v=_with_empty_columns(v, q.shape[-1]))
        settings["initial_state"] = starts_BHKX
        o_BTHV, state_BHKV = _wide_kda(wide, start_BHKV, axis, settings)
        o_BTHV = o_BTHV.astype(v.dtype)
    if not output_final_state:
        return o_BTHV, None
    assert state_BHKV is not None  # it was asked for
    if share_final_state:
        state_BHKV = from_rank(state_BHKV, lax.axis_size(axis) - 1, axis)
    return o_BTHV, state_BHKV


def _wide_kda(
    wide: Inputs, start_BHKV: Array, axis: str, settings: dict[str, Any]
) -> tuple[Array, Array]:
    """o, not yet rounded, and this rank's last state, from V + K columns."""
    o_BTHX, end_BHKX = kda(**wide._asdict(), **settings)
    assert end_BHKX is not None  # it was asked for
    ids_BT, passes_RB = settings["segment_ids"], None
    if ids_BT is not None:
        passes_RB = ranks.state_passes(ids_BT, axis)
    entry_BHKV = ranks.exchange(end_BHKX, start_BHKV, passes_RB, axis)
    o_BTHV = _read(o_BTHX, entry_BHKV, wide.q.dtype)
    return o_BTHV, ranks.through(end_BHKX, entry_BHKV)


def _two_starts(given: Inputs) -> Array:
    """[0 | I]: the entry states of all value columns, [B,HV,K,V+K]."""
    B, _, H, V = given.v.shape
    K = given.q.shape[-1]
    dtype = accumulation_dtype(*given[:5])
    return jnp.broadcast_to(jnp.eye(K, V + K, V, dtype), (B, H, K, V + K))


def _with_empty_columns(v_BTHV: Array, count: int) -> Array:
    wide = jnp.promote_types(v_BTHV.dtype, jnp.float32)
    return jnp.pad(v_BTHV.astype(wide), [(0, 0)] * 3 + [(0, count)])


def _read(o_BTHX, entry_BHKV, dtype):
    """The outputs, from [o0 | r] and the entry state."""
    o0_BTHV, r_BTHK = jnp.split(o_BTHX, [entry_BHKV.shape[-1]], axis=-1)
    # As `kda`: accelerators may round products of bfloat16 inputs alone.
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return o0_BTHV + jnp.einsum(
        "bthk,bhkv->bthv", r_BTHK, entry_BHKV, precision=precision
    )
