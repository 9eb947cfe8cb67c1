"""Muon: momentum, orthogonalised by Newton-Schulz (Kimi K3 report Sec. 2.5).

On a mesh a matrix is split, and every Newton-Schulz step needs all of it. So matrices
change places first: of many of equal shape each device gets some whole, works on them
alone, and gives the parts back. That is one all-to-all for each axis of the matrix that
is split, and the same on the way back:

    held       every matrix in parts    [b, m / devices, n]
    exchanged  some matrices whole      [b / devices, m, n]

Equal matrices of all layers go together, which leaves few devices idle and few loops to
compile. Where there are fewer than devices, some get zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from kimi_jax import sharding

# f(x) = a x + b (x x^T) x + c (x x^T)^2 x, of each step (Keller Jordan's choice).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

Axes = tuple[str, ...]


class MuonState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]  # int32 scalar: finished steps
    mu: Any  # momentum, like the parameters


class _Leaf(NamedTuple):
    """A parameter's momentum, where it lies, and which of its axes are a matrix."""

    x: jax.Array
    spec: PartitionSpec
    axes: MuonDimensionNumbers


def scale_by_muon(
    dimensions: Any,
    *,
    momentum: float,
    momentum_dtype: jax.typing.DTypeLike | None,
    dtype: jax.typing.DTypeLike | None,
) -> optax.GradientTransformation:
    """Nesterov momentum, corrected for its start; then its orthogonal factor.

    Args:
      dimensions: tree of `MuonDimensionNumbers` like the parameters; axes count from
        the end. All other axes are batch axes.
      momentum: share of the old momentum that is kept.
      momentum_dtype: that momentum is kept in; None: of the parameters.
      dtype: that matrices travel and are multiplied in; None: of the parameters.

    Under a mesh, updates lie where `sharding.PARAMETERS` puts the parameters.
    """

    def init(params: Any) -> MuonState:
        mu = optax.tree.zeros_like(params, dtype=momentum_dtype)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(grads: Any, state: MuonState, params: Any = None) -> Any:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, momentum, 1)
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mu, momentum, count + 1),
            optax.tree.bias_correction(grads, momentum, count),
        )
        updates = orthogonalise(ahead, dimensions, dtype)
        return updates, MuonState(count, optax.tree.cast(mu, momentum_dtype))

    return optax.GradientTransformation(init, update)


def orthogonalise(
    tree: Any, dimensions: Any, dtype: jax.typing.DTypeLike | None = None
) -> Any:
    """Every matrix of `tree` with its singular values near 1, in the dtype it has."""
    described = jax.tree_util.tree_map_with_path(
        lambda path, x, axes: _Leaf(x, sharding.parameter_spec(path, x), axes),
        tree,
        dimensions,
    )
    leaves = jax.tree.leaves(described, is_leaf=_is_leaf)
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        alike = sides(leaf.x.shape, leaf.axes), _places(leaf), leaf.x.dtype
        groups.setdefault(alike, []).append(i)
    results: dict[int, jax.Array] = {}
    for (_, places, _), members in groups.items():
        made = _group([leaves[i] for i in members], places, dtype)
        results |= dict(zip(members, made, strict=True))
    return jax.tree.unflatten(
        jax.tree.structure(tree), [results[i] for i in range(len(leaves))]
    )


def newton_schulz(x_bmn: jax.Array) -> jax.Array:
    """Each matrix over its norm, then `STEPS` steps; singular values of 0.7 to 1.2."""
    if x_bmn.shape[1] > x_bmn.shape[2]:
        return newton_schulz(x_bmn.swapaxes(1, 2)).swapaxes(1, 2)
    wide_bmn = x_bmn.astype(jnp.promote_types(x_bmn.dtype, jnp.float32))
    norm_b11 = jnp.sqrt(jnp.sum(jnp.square(wide_bmn), (1, 2), keepdims=True))
    x_bmn = (wide_bmn / (norm_b11 + 1e-8)).astype(x_bmn.dtype)
    a, b, c = COEFFICIENTS

    def step(_: int, x_bmn: jax.Array) -> jax.Array:
        square_bmm = x_bmn @ x_bmn.swapaxes(1, 2)
        return a * x_bmn + (b * square_bmm + c * square_bmm @ square_bmm) @ x_bmn

    # A loop: unrolled, this would be most of the program to compile.
    return jax.lax.fori_loop(0, STEPS, step, x_bmn)


def _group(
    leaves: Sequence[_Leaf],
    places: tuple[Axes, Axes],
    dtype: jax.typing.DTypeLike | None,
) -> Sequence[jax.Array]:
    """Orthogonalises parameters whose matrices are alike in size and place."""

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        """What a device does with its parts of them."""
        parts = [
            _as_matrices(x, leaf.axes) for x, leaf in zip(arrays, leaves, strict=True)
        ]
        x_bmn = jnp.concatenate(parts)
        x_bmn = x_bmn.astype(x_bmn.dtype if dtype is None else dtype)
        x_bmn = _with_whole(x_bmn, places, newton_schulz)
        ends = list(itertools.accumulate(part.shape[0] for part in parts))
        return tuple(
            _from_matrices(own_bmn.astype(x.dtype), x.shape, leaf.axes)
            for own_bmn, x, leaf in zip(
                jnp.split(x_bmn, ends[:-1]), arrays, leaves, strict=True
            )
        )

    arrays = [leaf.x for leaf in leaves]
    if sharding.context_mesh() is None:
        return local(*arrays)
    specs = tuple(leaf.spec for leaf in leaves)
    return jax.shard_map(local, in_specs=specs, out_specs=specs, check_vma=False)(
        *arrays
    )


def _with_whole(
    x_bmn: jax.Array,
    places: Sequence[Axes],
    function: Callable[[jax.Array], jax.Array],
    side: int = 1,
) -> jax.Array:
    """`function` of matrices, of which this device holds a part of every one."""
    if not places:
        return function(x_bmn)
    axes, *others = places
    if not axes:
        return _with_whole(x_bmn, others, function, side + 1)
    count = x_bmn.shape[0]
    missing = -count % jax.lax.axis_size(axes)
    x_bmn = jnp.pad(x_bmn, ((0, missing), (0, 0), (0, 0)))
    x_bmn = jax.lax.all_to_all(x_bmn, axes, 0, side, tiled=True)
    x_bmn = _with_whole(x_bmn, others, function, side + 1)
    return jax.lax.all_to_all(x_bmn, axes, side, 0, tiled=True)[:count]


def sides(shape: Sequence[int], axes: MuonDimensionNumbers) -> tuple[int, int]:
    """(m, n) of the matrices in an array of `shape`."""
    m, n = (math.prod(shape[i] for i in side) for side in _axes(axes, len(shape)))
    return m, n


def _is_leaf(node: Any) -> bool:
    return isinstance(node, _Leaf)


def _places(leaf: _Leaf) -> tuple[Axes, Axes]:
    """The mesh axes that m and n of a parameter's matrices are split over."""
    mesh, spec = sharding.context_mesh(), tuple(leaf.spec)
    if mesh is None:
        return (), ()
    spec += (None,) * (leaf.x.ndim - len(spec))
    found: list[Axes] = []
    for first, *rest in _axes(leaf.axes, leaf.x.ndim):
        if any(spec[axis] is not None for axis in rest):
            # Parts laid end to end would not be the matrix.
            raise ValueError(f"a side of a matrix is split over its inner axes: {leaf}")
        names = (spec[first],) if isinstance(spec[first], str) else spec[first] or ()
        found.append(tuple(name for name in names if mesh.shape[name] > 1))
    return found[0], found[1]


def _axes(axes: MuonDimensionNumbers, ndim: int) -> list[tuple[int, ...]]:
    """The axes that m and n are made of, counted from the start."""
    both = ((axis,) if isinstance(axis, int) else tuple(axis) for axis in axes)
    return [tuple(axis % ndim for axis in side) for side in both]


def _order(axes: MuonDimensionNumbers, ndim: int) -> tuple[int, ...]:
    """All axes: of the batch, of m, of n."""
    m, n = _axes(axes, ndim)
    return (*(axis for axis in range(ndim) if axis not in m + n), *m, *n)


def _as_matrices(x: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
    m, n = sides(x.shape, axes)
    return x.transpose(_order(axes, x.ndim)).reshape(x.size // (m * n), m, n)


def _from_matrices(
    x_bmn: jax.Array, shape: Sequence[int], axes: MuonDimensionNumbers
) -> jax.Array:
    order = _order(axes, len(shape))
    inverse = sorted(range(len(shape)), key=lambda axis: order[axis])
    return x_bmn.reshape([shape[axis] for axis in order]).transpose(inverse)
