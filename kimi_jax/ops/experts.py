"""The routed experts: each token's weighted sum over the experts it uses.

    y_n = sum_a weights_na * E_[experts_na](x_n)
    E_e(x) = w_down_e^T activation(w_gate_e^T x, w_up_e^T x)

  dense    runs every expert on every token: obviously correct, E / A times the work.
  blocked  sorts the slots (token, expert) by expert, cuts each expert's slots into
           blocks of equal size and multiplies each block by its expert's matrices:
           static shapes, nothing dropped, at most one part-filled block an expert.
  ragged   sorts the slots by expert, and leaves the rest to `jax.lax.ragged_dot`.
  padded   sorts, and gives every expert the same number of rows: no copies of matrices
           and the fastest on a GPU, but slots that find no room are dropped.

(Kimi K3 report, Eq. 11; latent projections and shared experts are outside, and so is
the way to experts on other devices: `kimi_jax.ops.dispatch`.)

Letters: N tokens, A slots per token, E experts, L width that experts read and write,
F hidden width, B blocks, R rows of a block, P = B * R rows in all, M = N * A slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops import rows as rows_lib
from kimi_jax.ops.activations import largest
from kimi_jax.ops.grouped_matmul import Groups, grouped_matmul
from kimi_jax.ops.rows import Rows, wide

Activation = Callable[[jax.Array, jax.Array], jax.Array]

IMPLEMENTATIONS = ("blocked", "ragged", "dense", "padded")

# Loads of experts scatter by at least 1 / sqrt(load): below this, more than a balanced
# router can help would be over a capacity of 1.25.
PADDED_LOAD = 256


def choose_experts(
    implementation: str | None, platform: str, *, load: float | None = None
) -> tuple[str, str]:
    """Says how experts are multiplied, and why.

    Args:
      implementation: what the caller asked for; None leaves the choice to us.
      platform: "cpu", "gpu" or "tpu", as `jax.default_backend()` returns it.
      load: slots of an expert under an even load, where slots over a capacity may be
        dropped; None where none may.

    Returns:
      (name, reason), the reason fit for a log line: a slow choice says so.

    Raises:
      ValueError: unknown implementation, or 'padded' where no slot may be dropped.
    """
    if implementation is None and platform == "tpu":
        return "ragged", "a TPU multiplies groups of any size natively"
    if implementation is None and platform == "gpu" and (load or 0) >= PADDED_LOAD:
        return "padded", "1.6 to 3.9 times as fast as 'blocked' on an H200; may drop"
    if implementation is None:
        return "blocked", f"drops nothing; 'ragged' is slow here: {_slow(platform)}"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown experts implementation {implementation!r}; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}, or None for the fastest"
        )
    if implementation == "padded" and load is None:
        raise ValueError(
            "implementation='padded' drops slots, which only dispatch by 'capacity' "
            "does; choose 'blocked', or None for the fastest"
        )
    if implementation == "ragged" and platform != "tpu":
        reason = f"asked for by name, but slow: {_slow(platform)}; try 'blocked'"
        return implementation, reason
    if implementation == "dense":
        return implementation, "asked for by name; runs every expert on every token"
    return implementation, "asked for by name"


def _slow(platform: str) -> str:
    if platform == "gpu":
        return "every row by every expert; 41 TFLOP/s on an H200 with 14 of them"
    return "every row by every expert"


class Computed(NamedTuple):
    """What the experts make of their tokens.

    Attributes:
      y_NL: each token's weighted sum.
      dropped: int32, slots for which there was no room; 0 but for 'padded'.
      hidden_max: largest |hidden| of a used slot, a scalar without gradient. XLA leaves
        it out of programs that do not read it.
    """

    y_NL: jax.Array
    dropped: jax.Array
    hidden_max: jax.Array


def experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array | None,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    implementation: str | None = "blocked",
    dtype: jax.typing.DTypeLike | None = None,
) -> Computed:
    """The weighted sum over each token's experts.

    Args:
      x_NL: tokens, any float dtype.
      experts_NA: integer expert of each slot; E = no expert, which adds nothing.
      weights_NA: weight of each slot; None = all 1.
      w_gate_ELF: matrices, in the dtype of x.
      w_up_ELF: as w_gate_ELF.
      w_down_EFL: as w_gate_ELF.
      activation: (gate, up) -> hidden, elementwise and finite at (0, 0).
      implementation: 'blocked', 'ragged' or 'dense' (see the file docstring); None =
        the fastest on the default backend that drops nothing, see `choose_experts`.
      dtype: of y; None = the dtype of x.

    Returns:
      See `Computed`; y_NL is summed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: unknown implementation, or shapes that do not fit.
    """
    name, _ = choose_experts(implementation, jax.default_backend())
    run = {"blocked": blocked_experts, "ragged": ragged_experts, "dense": dense_experts}
    made = run[name](
        x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL, activation
    )
    return made._replace(y_NL=made.y_NL.astype(x_NL.dtype if dtype is None else dtype))


def dense_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array | None,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
) -> Computed:
    """`experts` in float32 or wider, by running every expert on every token."""
    check(x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL)
    dtype = wide(x_NL)
    if weights_NA is None:
        weights_NA = jnp.ones(experts_NA.shape, dtype)
    chosen_NAE = jax.nn.one_hot(experts_NA, w_gate_ELF.shape[0], dtype=dtype)
    weight_NE = jnp.einsum("na,nae->ne", weights_NA.astype(dtype), chosen_NAE)
    gate_ENF = jnp.einsum("nl,elf->enf", x_NL, w_gate_ELF)
    up_ENF = jnp.einsum("nl,elf->enf", x_NL, w_up_ELF)
    hidden_ENF = activation(gate_ENF, up_ENF).astype(x_NL.dtype)
    out_ENL = jnp.einsum("enf,efl->enl", hidden_ENF, w_down_EFL)
    y_NL = jnp.einsum("ne,enl->nl", weight_NE, out_ENL.astype(dtype))
    used_EN1 = jnp.any(chosen_NAE > 0, axis=1).T[..., None]
    return Computed(y_NL, jnp.zeros((), jnp.int32), largest(hidden_ENF, used_EN1))


def blocked_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array | None,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    block_rows: int | None = None,
) -> Computed:
    """`experts` in float32 or wider, by sorting slots into blocks of one expert each.

    Every block holds its own copy of its expert's matrices, about
    `N * A / block_rows + E` of them: larger blocks copy less and pad more.

    Tokens sharded over devices give the same result, but XLA then sorts the slots of
    all devices together. With whole copies of the experts on each device, call this
    inside `jax.shard_map` over the token axis: every device sorts its own.

    Args:
      block_rows: R; None = a quarter of the mean load, see `default_block_rows`.
    """
    matrices = w_gate_ELF, w_up_ELF, w_down_EFL
    check(x_NL, experts_NA, weights_NA, *matrices)
    if block_rows is None:
        block_rows = default_block_rows(experts_NA.size, w_gate_ELF.shape[0])
    if block_rows < 1:
        raise ValueError(f"block_rows={block_rows}: choose at least 1, or None")
    if experts_NA.size == 0:
        return _nothing(x_NL)
    layout = _make_blocks(experts_NA, w_gate_ELF.shape[0], block_rows)
    return _run(x_NL, weights_NA, matrices, activation, *layout, "blocked")


def ragged_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array | None,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
) -> Computed:
    """`experts` in float32 or wider, by `jax.lax.ragged_dot` on sorted slots."""
    matrices = w_gate_ELF, w_up_ELF, w_down_EFL
    check(x_NL, experts_NA, weights_NA, *matrices)
    if experts_NA.size == 0:
        return _nothing(x_NL)
    layout = _make_blocks(experts_NA, w_gate_ELF.shape[0], 1)
    return _run(x_NL, weights_NA, matrices, activation, *layout, "ragged")


def padded_experts(
    x_NL: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array | None,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Activation,
    *,
    capacity: int,
) -> Computed:
    """`experts` in float32 or wider, of at most `capacity` slots of each expert.

    An expert drops the last choices, and the last tokens among equal choices.
    """
    matrices = w_gate_ELF, w_up_ELF, w_down_EFL
    check(x_NL, experts_NA, weights_NA, *matrices)
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: choose at least 1 row for each expert")
    N, E = x_NL.shape[0], w_gate_ELF.shape[0]
    slots = rows_lib.sort_slots(experts_NA, E)
    kept_E = jnp.minimum(slots.load_G, capacity)
    dropped = jnp.sum(slots.load_G - kept_E, dtype=jnp.int32)
    if experts_NA.size == 0:
        return _nothing(x_NL)
    start_E = jnp.arange(E, dtype=jnp.int32) * capacity
    rows = rows_lib.lay_out(slots, start_E, kept_E, E * capacity, N)
    groups = Groups(None, jnp.full(E, capacity, jnp.int32))
    made = _run(x_NL, weights_NA, matrices, activation, rows, groups, "blocked")
    return made._replace(dropped=dropped)


def default_block_rows(slots: int, num_experts: int) -> int:
    """A power of two at or above a quarter of the mean load, at least 16.

    Padding then adds about an eighth to the work of an even load, and the copies of the
    matrices stay near 5 E. Below 16 rows a matmul costs no less time.
    """
    quarter = slots // (4 * num_experts)
    return max(16, 1 << max(quarter - 1, 0).bit_length())


def _run(x_NL, weights_NA, matrices, activation, rows, groups, implementation):
    def matmul(x_PI, w_EIO):
        return grouped_matmul(x_PI, w_EIO, groups, implementation=implementation)

    w_gate_ELF, w_up_ELF, w_down_EFL = matrices
    x_PL = rows_lib.spread(x_NL, rows)
    hidden_PF = activation(matmul(x_PL, w_gate_ELF), matmul(x_PL, w_up_ELF))
    hidden_PF = hidden_PF.astype(x_NL.dtype)
    out_PL = matmul(hidden_PF, w_down_EFL)
    if weights_NA is None:
        y_NL = rows_lib.collect(out_PL, rows).astype(wide(x_NL))
    else:
        y_NL = rows_lib.combine(out_PL, weights_NA, rows)
    used_P1 = (rows.slot_P < rows.row_NA.size)[:, None]
    return Computed(y_NL, jnp.zeros((), jnp.int32), largest(hidden_PF, used_P1))


def _nothing(x_NL: jax.Array) -> Computed:
    """Of no slots."""
    zero = jnp.zeros((), x_NL.dtype)
    return Computed(jnp.zeros_like(x_NL, wide(x_NL)), jnp.zeros((), jnp.int32), zero)


def _make_blocks(experts_NA, num_experts: int, R: int) -> tuple[Rows, Groups]:
    (N, A), E = experts_NA.shape, num_experts
    slots = rows_lib.sort_slots(experts_NA, E)
    blocks_E = (slots.load_G + R - 1) // R
    last_block_E = jnp.cumsum(blocks_E, dtype=jnp.int32)
    # The most blocks that any routing can need: all non-empty experts fill all but one
    # row of a block.
    B = (N * A + min(E, N * A) * (R - 1)) // R
    block_B = jnp.arange(B, dtype=jnp.int32)
    expert_B = jnp.searchsorted(last_block_E, block_B, side="right")
    expert_B = jnp.minimum(expert_B, E - 1).astype(jnp.int32)
    start_E = (last_block_E - blocks_E) * R
    rows = rows_lib.lay_out(slots, start_E, slots.load_G, B * R, N)
    return rows, Groups(expert_B, blocks_E * R)


def check(x_NL, experts_NA, weights_NA, w_gate_ELF, w_up_ELF, w_down_EFL) -> None:
    """Raises ValueError for arguments of `experts` whose shapes do not fit."""
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
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} for x {x_NL.shape} "
                f"and {E} experts of hidden width {F}; check widths and flattening"
            )
