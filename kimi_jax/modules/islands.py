"""Calls that each device makes on its own part of the arrays.

XLA splits projections and elementwise work over a mesh by itself. What it would split
badly or not at all (recurrences, sorting, custom kernels, anything along time) runs in
`island`: a `jax.shard_map` over the mesh that is set, or a plain call without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from kimi_jax import sharding


def island(
    function: Callable[..., Any],
    *arguments: Any,
    inputs: Sequence[sharding.Axes | None],
    outputs: Any,
) -> Any:
    """function(*arguments), on the part of each that a device holds.

    Args:
      inputs: logical axes of each argument; None for an argument that is None.
      outputs: logical axes of the results, a tuple of names for each array.
    """
    if sharding.context_mesh() is None:
        return function(*arguments)
    return jax.shard_map(
        function,
        in_specs=tuple(
            None if axes is None else sharding.spec(*axes) for axes in inputs
        ),
        out_specs=jax.tree.map(
            lambda axes: sharding.spec(*axes), outputs, is_leaf=_is_axes
        ),
    )(*arguments)


def context_axis() -> str | None:
    """The mesh axis that splits time, if one does."""
    return axis_if_split("context")


def axis_if_split(name: str) -> str | None:
    """`name`, if the mesh that is set splits anything over it."""
    mesh = sharding.context_mesh()
    return name if mesh is not None and mesh.shape[name] > 1 else None


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(
        axis is None or isinstance(axis, str) for axis in node
    )
