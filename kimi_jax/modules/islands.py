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
    check: bool = False,
) -> Any:
    """function(*arguments), on the part of each that a device holds.

    Args:
      inputs: logical axes of each argument; None for an argument that is None.
      outputs: logical axes of the results, a tuple of names for each array. What does
        not name a mesh axis must be equal all along it.
      check: let JAX follow which values differ along which mesh axes. `function` has to
        be written for it, and is then spared sums of gradients that are whole already.
    """
    if sharding.context_mesh() is None:
        return function(*arguments)
    specs = [None if axes is None else sharding.spec(*axes) for axes in inputs]
    results = jax.tree.map(lambda a: sharding.spec(*a), outputs, is_leaf=_is_axes)
    local = jax.shard_map(
        function, in_specs=tuple(specs), out_specs=results, check_vma=check
    )
    return local(*arguments)


def axis_if_split(name: str) -> str | None:
    """`name`, if the mesh that is set splits anything over it."""
    mesh = sharding.context_mesh()
    return name if mesh is not None and mesh.shape[name] > 1 else None


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(
        axis is None or isinstance(axis, str) for axis in node
    )
