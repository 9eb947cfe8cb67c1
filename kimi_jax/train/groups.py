"""One number for each component of the model, from a tree like its parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import accounting, canonical


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
        part = accounting.part_of(canonical.path_name(path))
        name = f"{prefix}/{part.lower().replace(' ', '_')}"
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        squares[name] = squares.get(name, jnp.float32(0)) + square
        sizes[name] = sizes.get(name, 0) + leaf.size
    # As floats: the experts of K3 are more than an int32 counts.
    return {name: jnp.sqrt(squares[name] / float(sizes[name])) for name in squares}
