"""The routed experts: each token's weighted sum over the experts it uses.

    y_n = sum_a weights_na * E_[experts_na](x_n)
    E_e(x) = w_down_e^T activation(w_gate_e^T x, w_up_e^T x)

`dense_experts` runs every expert on every token: obviously correct, E/A times too much
work. `blocked_experts` sorts the slots (token, expert) by expert, cuts each expert's
slots into blocks of equal size and multiplies each block by its expert's matrices: one
batched matmul of static shape, no token dropped, at most one part-filled block for each
expert. (Kimi K3 report, Eq. 11; latent projections and shared experts are outside.)

Letters: N tokens, A slots per token, E experts, L width that experts read and write,
F hidden width, B blocks, R rows of a block, P = B * R rows in all, M = N * A slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops.activations import largest

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    implementation: str = "blocked",
    with_max: bool = False,
) -> Any:
    """The weighted sum over each token's experts.

    Args:
      x_NL: tokens, any float dtype.
      experts_NA: integer expert of each slot; E = no expert, which adds nothing.
      weights_NA: weight of each slot.
      w_gate_ELF: matrices, in the dtype of x.
      w_up_ELF: as w_gate_ELF.
      w_down_EFL: as w_gate_ELF.
      activation: (gate, up) -> hidden, elementwise and finite at (0, 0).
      implementation: 'blocked' or 'dense' (see the file docstring).
      with_max: also return the largest hidden magnitude.

    Returns:
      y_NL in the dtype of x, summed in float32 (float64 for float64 inputs);
      with_max: (y_NL, the largest |hidden| of a used slot, a scalar in x's dtype
      without gradient).

    Raises:
      ValueError: unknown implementation, or shapes that do not fit.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"unknown experts implementation {implementation!r}; choose one of "
            f"{', '.join(_IMPLEMENTATIONS)}"
        )
    return _IMPLEMENTATIONS[implementation](
        x_NL,
        experts_NA,
        weights_NA,
        w_gate_ELF,
        w_up_ELF,
        w_down_EFL,
        activation,
        with_max=with_max,
    )


def dense_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    with_max: bool = False,
) -> Any:
    """`experts`, by running every expert on every token. The reference."""
    _check(x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL)
    dtype = _wide(x_NL)
    chosen_NAE = jax.nn.one_hot(experts_NA, w_gate_ELF.shape[0], dtype=dtype)
    weight_NE = jnp.einsum("na,nae->ne", weights_NA.astype(dtype), chosen_NAE)
    gate_ENF = jnp.einsum("nl,elf->enf", x_NL, w_gate_ELF)
    up_ENF = jnp.einsum("nl,elf->enf", x_NL, w_up_ELF)
    hidden_ENF = activation(gate_ENF, up_ENF).astype(x_NL.dtype)
    out_ENL = jnp.einsum("enf,efl->enl", hidden_ENF, w_down_EFL)
    y_NL = jnp.einsum("ne,enl->nl", weight_NE, out_ENL.astype(dtype))
    y_NL = y_NL.astype(x_NL.dtype)
    if not with_max:
        return y_NL
    used_EN1 = jnp.any(chosen_NAE > 0, axis=1).T[..., None]
    return y_NL, largest(hidden_ENF, used_EN1)


def blocked_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    block_rows: int | None = None,
    with_max: bool = False,
) -> Any:
    """`experts`, by sorting slots into blocks that each belong to one expert.

    Every block holds its own copy of its expert's matrices, about
    `N * A / block_rows + E` of them: larger blocks copy less and pad more.

    Tokens sharded over devices give the same result, but XLA then sorts the slots of
    all devices together. With whole copies of the experts on each device, call this
    inside `jax.shard_map` over the token axis: every device sorts its own.

    Args:
      block_rows: R; None = a quarter of the mean load, see `default_block_rows`.
    """
    _check(x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL)
    num_experts = w_gate_ELF.shape[0]
    if block_rows is None:
        block_rows = default_block_rows(experts_NA.size, num_experts)
    if block_rows < 1:
        raise ValueError(f"block_rows={block_rows}: choose at least 1, or None")
    if experts_NA.size == 0:
        y_NL = jnp.zeros_like(x_NL)
        return (y_NL, jnp.zeros((), x_NL.dtype)) if with_max else y_NL
    blocks = _make_blocks(experts_NA.astype(jnp.int32), num_experts, block_rows)
    weight_P1 = _spread(
        weights_NA.astype(_wide(x_NL)).reshape(-1, 1),
        blocks.slot_P,
        blocks.row_NA.reshape(-1, 1),
    )
    x_PL = _spread(x_NL, blocks.token_P, blocks.row_NA)
    x_BRL = x_PL.reshape(-1, block_rows, x_NL.shape[1])
    gate_BRF = jnp.einsum("brl,blf->brf", x_BRL, _take(w_gate_ELF, blocks.expert_B))
    up_BRF = jnp.einsum("brl,blf->brf", x_BRL, _take(w_up_ELF, blocks.expert_B))
    hidden_BRF = activation(gate_BRF, up_BRF).astype(x_NL.dtype)
    out_BRL = jnp.einsum("brf,bfl->brl", hidden_BRF, _take(w_down_EFL, blocks.expert_B))
    out_PL = out_BRL.reshape(x_PL.shape) * weight_P1
    y_NL = _collect(out_PL, blocks.token_P, blocks.row_NA).astype(x_NL.dtype)
    if not with_max:
        return y_NL
    used_BR1 = (blocks.slot_P < experts_NA.size).reshape(-1, block_rows, 1)
    return y_NL, largest(hidden_BRF, used_BR1)


def default_block_rows(slots: int, num_experts: int) -> int:
    """A power of two at or above a quarter of the mean load, at least 16.

    Padding then adds about an eighth to the work of an even load, and the copies of the
    matrices stay near 5 E. Below 16 rows a matmul costs no less time.
    """
    quarter = slots // (4 * num_experts)
    return max(16, 1 << max(quarter - 1, 0).bit_length())


class _Blocks(NamedTuple):
    """Where each slot goes. Rows that hold no slot point one past the end."""

    slot_P: jax.Array  # slot in each row, M if empty
    token_P: jax.Array  # its token, N if empty
    row_NA: jax.Array  # row of each slot, P if it has no expert
    expert_B: jax.Array  # expert of each block, ascending


def _make_blocks(experts_NA: jax.Array, num_experts: int, R: int) -> _Blocks:
    N, A = experts_NA.shape
    M, E = N * A, num_experts
    expert_M = experts_NA.reshape(M)
    expert_M = jnp.where((expert_M >= 0) & (expert_M < E), expert_M, E)
    slot_M = jnp.argsort(expert_M, stable=True).astype(jnp.int32)
    sorted_M = expert_M[slot_M]
    first = jnp.searchsorted(sorted_M, jnp.arange(E + 1, dtype=jnp.int32))
    first = first.astype(jnp.int32)
    load_E = first[1:] - first[:-1]
    blocks_E = (load_E + R - 1) // R
    last_block_E = jnp.cumsum(blocks_E)
    first_block_E = last_block_E - blocks_E
    # The most blocks that any routing can need: all non-empty experts fill all but one
    # row of a block.
    B = (M + min(E, M) * (R - 1)) // R
    block_B = jnp.arange(B, dtype=jnp.int32)
    expert_B = jnp.searchsorted(last_block_E, block_B, side="right")
    expert_B = jnp.minimum(expert_B, E - 1).astype(jnp.int32)

    rank_BR = ((block_B - first_block_E[expert_B]) * R)[:, None] + jnp.arange(R)
    source_BR = jnp.minimum(first[expert_B][:, None] + rank_BR, M - 1)
    filled_BR = rank_BR < load_E[expert_B][:, None]
    slot_P = jnp.where(filled_BR, slot_M[source_BR], M).reshape(-1)

    known_M = jnp.minimum(sorted_M, E - 1)
    rank_M = jnp.arange(M, dtype=jnp.int32) - first[known_M]
    row_M = jnp.where(sorted_M < E, first_block_E[known_M] * R + rank_M, B * R)
    row_NA = jnp.zeros_like(row_M).at[slot_M].set(row_M, unique_indices=True)
    return _Blocks(slot_P, slot_P // A, row_NA.reshape(N, A), expert_B)


# A row has one token and a token at most A rows, so each of the next two functions is
# the transpose of the other and both are gathers; JAX would differentiate a gather into
# a scatter-add.


@jax.custom_vjp
def _spread(x_NL, token_P, row_NA):
    """x_PL: each row's token, or zeros."""
    return x_NL.at[token_P].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(x_PL, token_P, row_NA):
    """x_NL: the sum of each token's rows."""
    x_NAL = x_PL.at[row_NA].get(mode="fill", fill_value=0)
    return jnp.sum(x_NAL, axis=1, dtype=_wide(x_PL)).astype(x_PL.dtype)


_spread.defvjp(
    lambda x_NL, *index: (_spread(x_NL, *index), index),
    lambda index, dx_PL: (_collect(dx_PL, *index), None, None),
)
_collect.defvjp(
    lambda x_PL, *index: (_collect(x_PL, *index), index),
    lambda index, dx_NL: (_spread(dx_NL, *index), None, None),
)


def _take(w_EIO, expert_B):
    """w_BIO. Through the cast, gradients of an expert's blocks add up in float32.

    XLA:GPU needs minutes to compile the gradient if told that the indices are sorted.
    """
    w_BIO = w_EIO.astype(_wide(w_EIO)).at[expert_B].get(mode="promise_in_bounds")
    return w_BIO.astype(w_EIO.dtype)


_IMPLEMENTATIONS = {"blocked": blocked_experts, "dense": dense_experts}


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _check(x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL) -> None:
    if x_NL.ndim != 2 or w_gate_ELF.ndim != 3:
        raise ValueError(
            f"experts need x [N, L] and w_gate [E, L, F], got {x_NL.shape} and "
            f"{w_gate_ELF.shape}; flatten the tokens"
        )
    (N, L), (E, _, F) = x_NL.shape, w_gate_ELF.shape
    if experts_NA.ndim != 2 or not jnp.issubdtype(experts_NA.dtype, jnp.integer):
        raise ValueError(
            f"experts_NA must be integers [N, A], got {experts_NA.dtype} "
            f"{experts_NA.shape}; pass Routing.experts_NA"
        )
    expected = {
        "experts_NA": (experts_NA, (N, experts_NA.shape[1])),
        "weights_NA": (weights_NA, (N, experts_NA.shape[1])),
        "w_gate_ELF": (w_gate_ELF, (E, L, F)),
        "w_up_ELF": (w_up_ELF, (E, L, F)),
        "w_down_EFL": (w_down_EFL, (E, F, L)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} for x {x_NL.shape} "
                f"and {E} experts of hidden width {F}; check widths and flattening"
            )
