"""One number for each component of the model, from a tree like its parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import accounting, canonical
from kimi_jax.train.optimizer import PER_HEAD


def rms_by_group(tree: Any, prefix: str) -> dict[str, jax.Array]:
    """{prefix/group: root mean square} over all elements of each group, float32.

    Groups are the parts that `experiments.doctor` counts, as "routed_experts". One pass
    over the tree: next to a train step it costs nothing.

    Args:
      tree: parameters, gradients or updates, stacked or canonical.
      prefix: what the tree holds, as "gradient_rms".
    """
    squares: dict[str, jax.Array] = {}
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(prefix, path)
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        squares[name] = squares.get(name, jnp.float32(0)) + square
        sizes[name] = sizes.get(name, 0) + leaf.size
    # As floats: the experts of K3 are more than an int32 counts.
    return {name: jnp.sqrt(squares[name] / float(sizes[name])) for name in squares}


def head_spread(tree: Any, prefix: str) -> dict[str, jax.Array]:
    """{prefix/group: how unevenly heads share a tree of updates}, float32; 1: evenly.

    Of every matrix of queries, keys or values, the RMS of the head that has the largest
    over the RMS of all heads; the mean over the matrices of a group.

    Args:
      tree: as in `rms_by_group`.
    """
    ratios: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if canonical.path_name(path).rpartition("/")[2] in PER_HEAD:
            # [..., in, H, out] -> [..., H]
            square_H = jnp.mean(jnp.square(leaf.astype(jnp.float32)), axis=(-3, -1))
            mean, largest = jnp.mean(square_H, axis=-1), jnp.max(square_H, axis=-1)
            ratio = jnp.sqrt(largest / jnp.maximum(mean, jnp.finfo(mean.dtype).tiny))
            ratios.setdefault(_name(prefix, path), []).append(jnp.mean(ratio))
    return {name: jnp.mean(jnp.stack(found)) for name, found in ratios.items()}


def _name(prefix: str, path: Any) -> str:
    """ "gradient_rms/routed_experts": the group of a parameter."""
    part = accounting.part_of(canonical.path_name(path))
    return f"{prefix}/{part.lower().replace(' ', '_')}"
