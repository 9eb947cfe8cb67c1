"""What the ranks of a context axis have to tell each other about their neighbours.

For calls inside `jax.shard_map`, over a mesh axis that splits time into pieces of equal
length, rank 0 first. `axis` is always the name of that mesh axis; T is the length of
one piece and R the number of ranks.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kimi_jax.ops.segments import check_segment_ids, document_starts


def vary_like[Tree](tree: Tree, *others: object) -> Tree:
    """Marks arrays as varying over every manual mesh axis that the others vary over.

    Without it a constant could not start a scan over sharded arrays. Its transpose sums
    the gradients over these axes. Does nothing under `check_vma=False`.
    """

    def axes_of(x: Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    wanted = frozenset().union(*map(axes_of, jax.tree.leaves((tree, *others))))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(wanted - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def from_earlier[Tree](
    tree: Tree, axis: str, hops: int = 1, wrap: bool = False
) -> Tree:
    """Every array as the rank `hops` before this one holds it.

    Zeros where there is no such rank; with `wrap` the last rank comes before rank 0.
    """
    R = lax.axis_size(axis)
    pairs = [(r, (r + hops) % R) for r in range(R) if wrap or r + hops < R]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def previous_tokens(x_BT: Array, count: int, axis: str) -> Array:
    """The `count` tokens before this rank's piece: [B, count, ...].

    Zeros before the first token of all. A piece shorter than `count` costs one exchange
    for every rank that the tokens come from; else there is one.
    """
    B, T, *rest = x_BT.shape
    tokens: list[Array] = []
    have = 0
    for hops in range(1, lax.axis_size(axis)):
        if have >= count or T == 0:
            break
        part = from_earlier(x_BT[:, max(0, T - (count - have)) :], axis, hops)
        tokens, have = [part, *tokens], have + part.shape[1]
    if have < count or not tokens:
        # Never an empty array: XLA's partitioner crashes on some of those.
        missing = jnp.zeros((B, count - have, *rest), x_BT.dtype)
        tokens = [vary_like(missing, x_BT), *tokens]
    return jnp.concatenate(tokens, axis=1)


def starts_relative(segment_ids_BT: Array, axis: str) -> Array:
    """First token of each token's document, counted from this rank's first token.

    As `document_starts`, so negative for a document that began on an earlier rank; but
    padding starts at itself. Gathers the ids: four bytes a token.

    Returns:
      int32 [B, T].
    """
    check_segment_ids(segment_ids_BT)
    T = segment_ids_BT.shape[1]
    offset = lax.axis_index(axis) * T
    all_BT = lax.all_gather(segment_ids_BT, axis, axis=1, tiled=True)
    start_BT = lax.dynamic_slice_in_dim(document_starts(all_BT), offset, T, axis=1)
    t_T = jnp.arange(T, dtype=jnp.int32)
    return jnp.minimum(start_BT - offset, t_T)


def from_rank(x_B: Array, rank_B: Array | int, axis: str) -> Array:
    """The array of one rank on all ranks; a gradient reaches that rank alone.

    Args:
      x_B: [B, ...].
      rank_B: whose array to take, one rank or one for each row; equal on all ranks.
    """
    owns_B = jnp.asarray(lax.axis_index(axis) == rank_B)
    owns_B = owns_B.reshape(owns_B.shape + (1,) * (x_B.ndim - owns_B.ndim))
    return lax.psum(jnp.where(owns_B, x_B, jnp.zeros_like(x_B)), axis)
