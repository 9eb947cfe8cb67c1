"""Slots laid out in rows: which row each slot takes, and gathers both ways.

A slot is one use of an expert by one token. To multiply all slots of one expert, or to
send all slots of one device, they are laid out next to each other in a buffer of rows.
Slots are numbered a * N + n: wherever room is short, the second choices of all tokens
give way before any first choice does.

Letters: N tokens, A slots per token, M = A * N slots, G groups (experts, or devices),
P rows, L width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Where each slot lies. Both arrays point one past the end for "nowhere"."""

    slot_P: jax.Array  # int32 slot in each row, M if the row is empty
    row_NA: jax.Array  # int32 row of each slot, P if it has none


class Sorted(NamedTuple):
    """The slots in order of their groups, and by slot number within a group."""

    slot_M: jax.Array
    group_M: jax.Array  # ascending; G = no group
    first_G: jax.Array  # place of each group's first slot
    load_G: jax.Array  # slots of each group


def sort_slots(group_NA: jax.Array, num_groups: int) -> Sorted:
    """Sorts slots by group. A group outside [0, G) means that the slot is not used."""
    G = num_groups
    group_M = group_NA.T.reshape(-1).astype(jnp.int32)
    group_M = jnp.where((group_M >= 0) & (group_M < G), group_M, G)
    slot_M = jnp.argsort(group_M, stable=True).astype(jnp.int32)
    group_M = group_M[slot_M]
    bounds = jnp.searchsorted(group_M, jnp.arange(G + 1, dtype=jnp.int32))
    bounds = bounds.astype(jnp.int32)
    return Sorted(slot_M, group_M, bounds[:-1], bounds[1:] - bounds[:-1])


def lay_out(
    slots: Sorted, start_G: jax.Array, kept_G: jax.Array, num_rows: int, tokens: int
) -> Rows:
    """Gives the first `kept` slots of each group the rows from `start` on.

    Args:
      slots: from `sort_slots`.
      start_G: first row of each group; ascending, and groups do not overlap.
      kept_G: slots of each group that get a row, at most its load.
      num_rows: P.
      tokens: N.
    """
    G, M, P = start_G.shape[0], slots.slot_M.shape[0], num_rows
    row_P = jnp.arange(P, dtype=jnp.int32)
    group_P = jnp.searchsorted(start_G, row_P, side="right").astype(jnp.int32) - 1
    group_P = jnp.maximum(group_P, 0)
    rank_P = row_P - start_G[group_P]
    filled_P = (rank_P >= 0) & (rank_P < kept_G[group_P])
    source_P = jnp.clip(slots.first_G[group_P] + rank_P, 0, M - 1)
    slot_P = jnp.where(filled_P, slots.slot_M[source_P], M)

    group_M = jnp.minimum(slots.group_M, G - 1)
    rank_M = jnp.arange(M, dtype=jnp.int32) - slots.first_G[group_M]
    kept_M = (slots.group_M < G) & (rank_M < kept_G[group_M])
    row_M = jnp.where(kept_M, start_G[group_M] + rank_M, P)
    row_M = jnp.zeros_like(row_M).at[slots.slot_M].set(row_M, unique_indices=True)
    return Rows(slot_P, row_M.reshape(-1, tokens).T)


# A row has one slot and a slot at most one row, so each function below is the transpose
# of another and all are gathers; JAX would differentiate a gather into a scatter-add.


@jax.custom_vjp
def spread(x_NL: jax.Array, rows: Rows) -> jax.Array:
    """x_PL: the token of each row, or zeros."""
    N = x_NL.shape[0]
    token_P = jnp.where(rows.slot_P < rows.row_NA.size, rows.slot_P % N, N)
    return x_NL.at[token_P].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(x_PL: jax.Array, rows: Rows) -> jax.Array:
    """x_NL: the sum of each token's rows, added up in float32 or wider."""
    return jnp.sum(_take(x_PL, rows), axis=1, dtype=wide(x_PL)).astype(x_PL.dtype)


@jax.custom_vjp
def combine(x_PL: jax.Array, weights_NA: jax.Array, rows: Rows) -> jax.Array:
    """x_NL: the weighted sum of each token's rows, in float32 or wider."""
    weights_NA1 = weights_NA.astype(wide(x_PL))[..., None]
    return jnp.sum(weights_NA1 * _take(x_PL, rows), axis=1)


def _combine_forward(x_PL, weights_NA, rows):
    return combine(x_PL, weights_NA, rows), (x_PL, weights_NA, rows)


def _combine_backward(saved, dy_NL):
    x_PL, weights_NA, rows = saved
    weight_M = weights_NA.T.reshape(-1).astype(dy_NL.dtype)
    weight_P = weight_M.at[rows.slot_P].get(mode="fill", fill_value=0)
    dx_PL = (weight_P[:, None] * spread(dy_NL, rows)).astype(x_PL.dtype)
    dweights_NA = jnp.sum(dy_NL[:, None] * _take(x_PL, rows), axis=2)
    return dx_PL, dweights_NA.astype(weights_NA.dtype), None


spread.defvjp(
    lambda x_NL, rows: (spread(x_NL, rows), rows),
    lambda rows, dx_PL: (collect(dx_PL, rows), None),
)
collect.defvjp(
    lambda x_PL, rows: (collect(x_PL, rows), rows),
    lambda rows, dx_NL: (spread(dx_NL, rows), None),
)
combine.defvjp(_combine_forward, _combine_backward)


def wide(x: jax.Array) -> jnp.dtype:
    """The dtype that sums over x are taken in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _take(x_PL, rows):
    """x_NAL: the row of each slot, or zeros."""
    return x_PL.at[rows.row_NA].get(mode="fill", fill_value=0)
