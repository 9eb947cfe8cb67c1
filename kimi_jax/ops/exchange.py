"""Rows sent between the devices of a mesh axis, and back.

Called inside `jax.shard_map`. A trip says, for every pair of devices, which rows go
from one to the other. Two ways to make it:

  ragged_all_to_all  sends exactly these rows.
  all_gather         sends everything to everyone, and each device keeps its own. Exact
                     too, at X times the bytes and memory: for backends without the
                     first, which is to say for tests.

Letters: S sending and D receiving devices, X of each, P rows, L width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("ragged_all_to_all", "all_gather")


class Trip(NamedTuple):
    """The rows of every pair of devices; each array is int32, known to all devices."""

    from_SD: jax.Array  # first row in the sender's buffer
    to_SD: jax.Array  # first row in the receiver's buffer
    size_SD: jax.Array  # number of rows

    def reversed(self) -> "Trip":
        """The way back: every row returns to where it came from."""
        return Trip(self.to_SD.T, self.from_SD.T, self.size_SD.T)


def choose_exchange(implementation: str | None, platform: str) -> tuple[str, str]:
    """Says how `exchange` sends rows, and why: (name, reason).

    Args:
      implementation: what the caller asked for; None leaves the choice to us.
      platform: "cpu", "gpu" or "tpu", of the devices that will run it.

    Raises:
      ValueError: unknown implementation.
    """
    if implementation is None and platform == "cpu":
        return (
            "all_gather",
            "XLA:CPU has no ragged all-to-all; exact, X times the bytes",
        )
    if implementation is None:
        return "ragged_all_to_all", f"sends exactly the rows needed on {platform}"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"exchange={implementation!r} does not exist; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}, or None for the default"
        )
    return implementation, "asked for by name"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def exchange(
    x_PL: jax.Array,
    trip: Trip,
    rows_sent: int,
    rows_received: int,
    axis: str | tuple[str, ...],
    implementation: str,
) -> jax.Array:
    """The rows that a trip brings to this device; rows that nothing arrives in are 0.

    The gradient is the same trip in reverse, not what JAX derives for the collective.

    Args:
      x_PL: this device's rows.
      trip: who sends what to whom.
      rows_sent: P, length of every sender's buffer.
      rows_received: length of every receiver's buffer.
      axis: name of the mesh axis, or of several, the first of them slowest.
      implementation: 'ragged_all_to_all' or 'all_gather'.
    """
    if x_PL.shape[0] != rows_sent:
        raise ValueError(f"rows_sent={rows_sent}, but x has shape {x_PL.shape}")
    me = jax.lax.axis_index(axis)
    if implementation == "all_gather":
        return _pick(jax.lax.all_gather(x_PL, axis), trip, rows_received, me)
    # Zeros that vary over the mesh axes that x varies over.
    zero_L = jnp.where(False, jnp.sum(x_PL[:1], axis=0), 0).astype(x_PL.dtype)
    return jax.lax.ragged_all_to_all(
        x_PL,
        jnp.broadcast_to(zero_L, (rows_received, *x_PL.shape[1:])),
        input_offsets=trip.from_SD[me],
        send_sizes=trip.size_SD[me],
        output_offsets=trip.to_SD[me],
        recv_sizes=trip.size_SD[:, me],
        axis_name=axis,
    )


def _forward(x_PL, trip, *static):
    return exchange(x_PL, trip, *static), trip


def _backward(rows_sent, rows_received, axis, implementation, trip, dy_PL):
    back = (trip.reversed(), rows_received, rows_sent, axis, implementation)
    return exchange(dy_PL, *back), None


exchange.defvjp(_forward, _backward)


def _pick(x_SPL, trip, num_rows, me):
    """This device's rows out of everybody's."""
    start_S, size_S = trip.to_SD[:, me], trip.size_SD[:, me]
    row_P = jnp.arange(num_rows, dtype=jnp.int32)
    # Receivers lay senders out in order, so the last one that starts here sent it.
    sender_P = jnp.searchsorted(start_S, row_P, side="right") - 1
    sender_P = jnp.maximum(sender_P, 0)
    rank_P = row_P - start_S[sender_P]
    arrived_P = (rank_P >= 0) & (rank_P < size_S[sender_P])
    place_P = jnp.where(arrived_P, trip.from_SD[:, me][sender_P] + rank_P, -1)
    x_PL = x_SPL.at[sender_P, place_P].get(mode="clip")
    arrived_P = jnp.expand_dims(arrived_P, range(1, x_PL.ndim))
    return jnp.where(arrived_P, x_PL, 0)
