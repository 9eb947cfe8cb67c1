"""Experts on other devices: tokens travel to them, and their outputs back.

Called inside a `jax.shard_map` (with check_vma, which is its default) in which each
device has tokens of its own and, along an expert axis of X devices, whole experts of
its own: the d-th has experts d * E to (d + 1) * E - 1. Along a tensor axis each
expert's hidden width may be split further.

  local     no expert axis: every device has all experts.
  capacity  each device sends every other one a buffer of fixed size, by all-to-all:
            `factor` times the slots that it would get under an even load. Slots that
            do not fit are dropped, last choices first.
  ragged    each device sends exactly its slots. Only what a device receives in all is
            bounded, by `factor` times the even load; a factor of X drops nothing ever.

Tokens travel at the width L that they come in (K3: the latent, half the model's), and
unweighted; the weighted sum of a token's slots is taken at home, in float32, and is
whole before anything is normalised. Partial sums over the tensor axis are added up
after that sum and not before the way back: one row a token instead of A * factor.
See docs/expert_parallel.md for sizes and measurements.

Letters: N tokens of a device, A slots per token, M = A * N, X devices, C capacity,
P rows, E experts of one device, L and F widths.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops import rows as rows_lib
from kimi_jax.ops.exchange import Trip, choose_exchange, exchange
from kimi_jax.ops.experts import (
    Activation,
    Computed,
    check,
    choose_experts,
    experts,
    padded_experts,
)
from kimi_jax.ops.rows import Rows

METHODS = ("local", "capacity", "ragged")

Array = jax.Array
_Run = Callable[[Array, Array, Array | None], Computed]


class Options(NamedTuple):
    """How tokens reach their experts. All static.

    Attributes:
      method: 'local', 'capacity' or 'ragged' (see the file docstring). On one device of
        the expert axis nothing travels, whatever the method.
      expert_axis: mesh axis that experts are split over, or several, the first of them
        slowest; or None.
      tensor_axis: mesh axis that the hidden width is split over, or None.
      capacity_factor: room over an even load, at least 1; see docs/expert_parallel.md
        for the loads behind 1.25.
      implementation: see `experts.choose_experts`. Under 'padded', which needs
        'capacity', each expert has room for `capacity_factor` times an even load too.
      exchange: see `exchange.choose_exchange`; for 'ragged'.
      platform: 'cpu', 'gpu' or 'tpu': of the devices that will run this; None = of the
        default backend. Chooses where the two above are None.
    """

    method: str = "local"
    expert_axis: str | tuple[str, ...] | None = None
    tensor_axis: str | None = None
    capacity_factor: float = 1.25
    implementation: str | None = None
    exchange: str | None = None
    platform: str | None = None


class Dispatched(NamedTuple):
    """What comes back.

    Attributes:
      y_NL: weighted sums, in the dtype of x; the same all along the tensor axis.
      dropped: int32, how many slots this device had no room for, in sending or in
        receiving them; add it up over the axes that tokens are split over. Loads that
        balancing observes include them.
      hidden_max: largest |hidden| of its experts, over the tensor axis too.
    """

    y_NL: Array
    dropped: Array
    hidden_max: Array


def dispatch(
    x_NL: Array,
    experts_NA: Array,
    weights_NA: Array,
    w_gate_ELF: Array,
    w_up_ELF: Array,
    w_down_EFL: Array,
    activation: Activation,
    options: Options,
) -> Dispatched:
    """`kimi_jax.ops.experts.experts`, over the devices of a mesh.

    A dropped slot counts as a slot without an expert: it adds nothing, and its weight
    gets no gradient. The other weights of the token stay as they are.

    Args:
      x_NL: this device's tokens; the same ones all along the tensor axis.
      experts_NA: integer expert of each slot, numbered over the whole expert axis;
        anything outside = no expert.
      weights_NA: weight of each slot.
      w_gate_ELF: this device's part of its experts' matrices, in the dtype of x.
      w_up_ELF: as w_gate_ELF.
      w_down_EFL: as w_gate_ELF.
      activation: (gate, up) -> hidden, elementwise and finite at (0, 0).
      options: see `Options`.

    Raises:
      ValueError: an option that does not exist or fit, or shapes that do not fit.
    """
    matrices = w_gate_ELF, w_up_ELF, w_down_EFL
    check(x_NL, experts_NA, weights_NA, *matrices)
    _check_options(options)
    axes = _names(options.expert_axis) | _names(options.tensor_axis)
    # One cast for each token, here: casts further in would make the gradient add up
    # rows over the tensor axis, A * factor times as many.
    floats = x_NL, weights_NA
    x_NL, weights_NA = _vary(floats, like=(*floats, experts_NA), axes=axes)
    run = _local_experts(experts_NA.size, matrices, activation, options)
    if _size(options.expert_axis) == 1 or experts_NA.size == 0:
        made = run(x_NL, experts_NA, weights_NA)
        (dropped,) = _vary((made.dropped,), like=(experts_NA,), axes=set())
        made = made._replace(dropped=dropped)
    else:
        send = _by_capacity if options.method == "capacity" else _by_ragged
        made = send(x_NL, experts_NA, weights_NA, w_gate_ELF.shape[0], run, options)
    y_NL, dropped, hidden_max = made
    if options.tensor_axis is not None:
        y_NL = jax.lax.psum(y_NL, options.tensor_axis)
        hidden_max = jax.lax.pmax(hidden_max, options.tensor_axis)
    return Dispatched(y_NL.astype(x_NL.dtype), dropped, hidden_max)


def choose(options: Options, slots: int, num_experts: int) -> tuple[str, str]:
    """`choose_experts` for a device with `slots` slots and `num_experts` experts."""
    load = slots / num_experts if options.method == "capacity" else None
    return choose_experts(options.implementation, _platform(options), load=load)


def capacity(slots: int, devices: int, factor: float) -> int:
    """C: rows from one device to one other, of `slots` slots in all; at most all."""
    return min(_ceil(factor * slots / devices), slots)


def receive_rows(slots: int, devices: int, factor: float) -> int:
    """Rows that a device has room for under 'ragged', each device having `slots`."""
    return min(_ceil(factor * slots), slots * devices)


def _local_experts(slots, matrices, activation, options) -> _Run:
    """The experts of this device: (x_NL, experts_NA, weights_NA) -> Computed."""
    num_experts = matrices[0].shape[0]
    name, _ = choose(options, slots, num_experts)

    def run(x_NL, experts_NA, weights_NA):
        args = x_NL, experts_NA, weights_NA, *matrices, activation
        if name == "padded":
            room = _ceil(options.capacity_factor * slots / num_experts)
            return padded_experts(*args, capacity=max(room, 1))
        return experts(*args, implementation=name, dtype=rows_lib.wide(x_NL))

    return run


def _by_capacity(x_NL, experts_NA, weights_NA, E, run: _Run, options):
    (N, A), axis = experts_NA.shape, options.expert_axis
    X = _size(axis)
    C = capacity(N * A, X, options.capacity_factor)
    slots = rows_lib.sort_slots(experts_NA // E, X)
    kept_X = jnp.minimum(slots.load_G, C)
    start_X = jnp.arange(X, dtype=jnp.int32) * C
    rows = rows_lib.lay_out(slots, start_X, kept_X, X * C, N)

    def trade(x_P):
        return jax.lax.all_to_all(x_P, axis, split_axis=0, concat_axis=0, tiled=True)

    expert_P1 = trade(_expert_of_row(experts_NA, rows, E))[:, None]
    made = run(trade(rows_lib.spread(x_NL, rows)), expert_P1, None)
    out_PL = trade(made.y_NL.astype(x_NL.dtype))
    y_NL = rows_lib.combine(out_PL, weights_NA, rows)
    unsent = jnp.sum(slots.load_G - kept_X, dtype=jnp.int32)
    return Computed(y_NL, made.dropped + unsent, made.hidden_max)


def _by_ragged(x_NL, experts_NA, weights_NA, E, run: _Run, options):
    (N, A), axis = experts_NA.shape, options.expert_axis
    X, me = _size(axis), jax.lax.axis_index(axis)
    room = receive_rows(N * A, X, options.capacity_factor)
    slots = rows_lib.sort_slots(experts_NA // E, X)
    # Every device plans for all: who has room for what depends on everybody's loads.
    load_SD = jax.lax.all_gather(slots.load_G, axis)
    to_SD = jnp.minimum(_before(load_SD, axis=0), room)
    size_SD = jnp.minimum(load_SD, room - to_SD)
    trip = Trip(_before(size_SD, axis=1), to_SD, size_SD)
    rows = rows_lib.lay_out(slots, trip.from_SD[me], size_SD[me], N * A, N)

    name, _ = choose_exchange(options.exchange, _platform(options))
    there, back = (N * A, room, axis, name), (room, N * A, axis, name)
    # Rows in which nothing arrives are 0, so experts count from 1 on the way.
    expert_P = exchange(_expert_of_row(experts_NA, rows, E) + 1, trip, *there) - 1
    x_PL = exchange(rows_lib.spread(x_NL, rows), trip, *there)
    made = run(x_PL, expert_P[:, None], None)
    out_PL = exchange(made.y_NL.astype(x_NL.dtype), trip.reversed(), *back)
    y_NL = rows_lib.combine(out_PL, weights_NA, rows)
    unsent = jnp.sum(slots.load_G - size_SD[me], dtype=jnp.int32)
    return Computed(y_NL, unsent, made.hidden_max)


def _expert_of_row(experts_NA, rows: Rows, E: int):
    """expert_P: int32, as numbered on the device it lives on; -1 in empty rows."""
    expert_M = (experts_NA.T.reshape(-1) % E).astype(jnp.int32)
    return expert_M.at[rows.slot_P].get(mode="fill", fill_value=-1)


def _before(x, axis):
    """Sum of everything before each entry."""
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def _vary(arrays, like, axes):
    """Makes arrays vary over `axes` and over whatever axes any of `like` varies over.

    What an array varies over has no public name, but a choice takes it from both sides.
    """
    marks = [jax.lax.axis_index(axis) for axis in sorted(axes)]
    marks += [jnp.sum(jax.lax.stop_gradient(x)).astype(jnp.int32) for x in like]
    mark = sum(marks, start=jnp.zeros((), jnp.int32))
    return [jnp.where(False, mark.astype(x.dtype), x) for x in arrays]


def _platform(options: Options) -> str:
    return options.platform or jax.default_backend()


def _names(axis: str | tuple[str, ...] | None) -> set[str]:
    return {axis} if isinstance(axis, str) else set(axis or ())


def _size(axis: str | tuple[str, ...] | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def _ceil(x: float) -> int:
    """Not fooled by 1.1 * 10 > 11."""
    return math.ceil(x - 1e-9)


def _check_options(options: Options) -> None:
    method, axis, factor = options.method, options.expert_axis, options.capacity_factor
    if method not in METHODS:
        raise ValueError(
            f"unknown dispatch method {method!r}; choose one of {', '.join(METHODS)}"
        )
    if method == "local" and _size(axis) > 1:
        raise ValueError(
            f"method='local' cannot reach experts on the {_size(axis)} devices of axis "
            f"{axis!r}; use 'capacity' or 'ragged'"
        )
    if not factor >= 1:
        raise ValueError(
            f"capacity_factor={factor}: below 1 slots are dropped even under an even "
            "load; choose at least 1"
        )
