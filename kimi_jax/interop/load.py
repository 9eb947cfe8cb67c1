"""Models from any checkpoint, native or published, straight into their shards.

Arrays are read one after the other, and of each array the rows that lie on this host's
devices: an expert that lives elsewhere is not read here. The host holds one stacked
parameter's shards at a time, and a tensor for each reading thread.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from kimi_jax import canonical, config, config_io, layout
from kimi_jax import sharding as shardings
from kimi_jax.interop import native
from kimi_jax.interop.entries import InteropError, Shape
from kimi_jax.interop.sources import Source, open_source
from kimi_jax.modules import transformer

_SHOWN = 10
_READERS = 8
_VISION = "params/vision/"
# Fields that change how a model is trained or computed, but not what it is.
_FREE = {
    "dtype",
    "init_std",
    "attention",  # compared layer by layer
    "kda.chunk_size",
    "kda.residuals",
    "kda.implementation",
    "mla.block_size",
    "moe.implementation",
    "moe.dispatch",
    "moe.capacity_factor",
    "vision.block_size",
}
_FREE_SECTIONS = ("gqa.", "moe.balancing.", "residual.")


def load_model(
    path: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    dtype: str | None = None,
    verify: bool = True,
) -> tuple[config.Model, transformer.Variables]:
    """The model in `path` and its variables, {"params", "balance"}, on its devices.

    Args:
      path: a published folder, a workdir, or one of its folders checkpoints/STEP.
      mesh: from `sharding.make_mesh`; None: the default device.
      dtype: of all parameters; None: as they are stored, packed experts in bfloat16.
      verify: compare the files of a native checkpoint with their sums first. Published
        folders carry none.

    Raises:
      InteropError, CheckpointError: there is no checkpoint, or it is damaged, or not
        of a model that this library has.
    """
    source = open_source(path, verify=verify)
    check_fits(source, source.model)
    kinds = {name: leaf.dtype for name, leaf in source.arrays.items()}
    template = _template(
        source.model, mesh, lambda name, _: kinds[name] if dtype is None else dtype
    )
    return source.model, read_variables(source, source.model, template)


def load_variables(
    path: str | os.PathLike[str],
    model: config.Model,
    mesh: Mesh | None = None,
    *,
    dtype: str | None = None,
) -> transformer.Variables:
    """The variables of `model`, {"params", "balance"}, from a checkpoint of its arrays.

    Args:
      path, mesh: see `load_model`; the files of a native checkpoint are verified.
      model: may fold its layers otherwise than the one that was saved, and may leave
        out its vision tower.
      dtype: of all parameters; None: as `model` would draw them.

    Raises:
      InteropError, CheckpointError: as `load_model`, or the checkpoint holds other
        arrays than the model has.
    """
    source = open_source(path)
    template = _template(
        model, mesh, lambda _, leaf: leaf.dtype if dtype is None else dtype
    )
    return read_variables(source, model, template)


def _template(
    model: config.Model, mesh: Mesh | None, kind: Callable[[str, Any], Any]
) -> Any:
    """Shapes, dtypes and shardings of the variables of a model.

    Args:
      kind: (canonical name of the first array that a leaf stacks, leaf) -> dtype.
    """

    def place(path: Any, leaf: Any, name: str) -> jax.ShapeDtypeStruct:
        where: Sharding = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            where = NamedSharding(mesh, shardings.parameter_spec(path, leaf))
        to = np.dtype(kind(name, leaf))
        return jax.ShapeDtypeStruct(leaf.shape, to, sharding=where)

    template: dict[str, Any] = {"params": {}, "balance": {}}  # of no experts: empty
    for collection, tree in _shapes(model).items():
        firsts = _first_names(model, collection, tree)
        template[collection] = jax.tree_util.tree_map_with_path(place, tree, firsts)
    return template


def read_variables(source: Source, model: config.Model, template: Any) -> Any:
    """The arrays of `template`, {"params", "balance"}, from a source.

    Args:
      model: may fold its layers otherwise than the one that was saved.
      template: `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      InteropError: the source holds other arrays than the model has.
    """
    check_fits(source, model)
    places = canonical.places_of(model)
    with ThreadPoolExecutor(_READERS) as pool:

        def read(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            cells = _cells(canonical.path_name(path), places)
            return _read_array(source, cells, like, pool)

        return jax.tree_util.tree_map_with_path(read, template)


def differences(source: Source, model: config.Model) -> list[str]:
    """Fields in which `model` means something else than the model in the source."""
    theirs, ours = (_flat(config_io.to_dict(m)) for m in (source.model, model))
    lines = [
        f"model.{name}={ours.get(name)}: {theirs.get(name)} in {source.where}"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
        and name not in _FREE
        and not name.startswith(_FREE_SECTIONS)
    ]
    residual = source.model.residual
    if model.residual.kind != residual.kind or (
        residual.kind != "none" and model.residual != residual
    ):
        lines.append(f"model.residual={model.residual}: {residual} in {source.where}")
    return lines


@functools.lru_cache(maxsize=2)  # tracing a deep model takes seconds
def _shapes(model: config.Model) -> dict[str, Any]:
    return jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))


def _cells(
    name: str, places: Mapping[str, list[layout.Place]]
) -> list[tuple[str, tuple[int, ...]]]:
    """(canonical name, place on the leading axes) of all that a leaf stacks."""
    head, stacked, tail = canonical.split_name(name)
    if stacked is None:
        return [(name, ())]
    return [(f"{head}{place.name}{tail}", place.at) for place in places[stacked]]


def _first_names(model: config.Model, collection: str, tree: Any) -> Any:
    """For each leaf the canonical name of the first array that it stacks."""
    places = canonical.places_of(model)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _cells(f"{collection}/{canonical.path_name(path)}", places)[0][
            0
        ],
        tree,
    )


def check_fits(source: Source, model: config.Model) -> None:
    """That the arrays of the source are those of the model.

    A text model may leave out the vision tower of the source.

    Raises:
      InteropError: names that are missing or left over, or shapes that differ.
    """
    places = canonical.places_of(model)
    wanted: dict[str, Shape] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(model)):
        for name, at in _cells(canonical.path_name(path), places):
            wanted[name] = tuple(leaf.shape[len(at) :])
    stored = {
        name: x.shape
        for name, x in source.arrays.items()
        if model.vision is not None or not name.startswith(_VISION)
    }
    lines = [
        f"{name}: {stored.get(name, 'absent')} in the checkpoint, "
        f"{wanted.get(name, 'absent')} in the model"
        for name in {**stored, **wanted}
        if stored.get(name) != wanted.get(name)
    ]
    if lines:
        rest = len(lines) - _SHOWN
        more = [f"... and {rest} more"] if rest > 0 else []
        fields = [line for line in differences(source, model) if "=" in line]
        raise InteropError(
            f"{source.where} does not fit this model:\n  "
            + "\n  ".join([*lines[:_SHOWN], *more, *fields[:_SHOWN]])
            + "\nuse the config of that model, or another checkpoint"
        )


def _read_array(
    source: Source,
    cells: list[tuple[str, tuple[int, ...]]],
    like: jax.ShapeDtypeStruct,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """One array, stacked of `cells`, on the devices of `like.sharding`."""
    shape, sharding = like.shape, like.sharding
    indices = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    shards = {
        index: np.empty([stop - start for start, stop in index], like.dtype)
        for index in indices.values()
    }

    def fill(piece: tuple[str, tuple[int, ...], int, int]) -> None:
        name, at, start, stop = piece
        block = source.read(name, start, stop)
        for index, shard in shards.items():
            into, of = _overlap(index[len(at) :], start, stop)
            if of is not None:
                # In one go: of a stack of scalars, shard[at] is no view.
                shard[(*at, *into)] = block[of]

    wanted = [
        piece
        for piece in _pieces(source, cells)
        if any(
            _overlap(index[len(piece[1]) :], *piece[2:])[1] is not None
            for index in shards
        )
    ]
    # In batches, so that at most a few tensors are in memory.
    for batch in itertools.batched(wanted, _READERS):
        list(pool.map(fill, batch))
    placed = [
        jax.device_put(shards[index], device) for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _pieces(
    source: Source, cells: list[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for name, at in cells:
        shape = source.arrays[name].shape
        if not shape:
            yield name, at, 0, 1
            continue
        for start, stop in native.starts(shape[0], source.rows(name)):
            yield name, at, start, stop


def _overlap(
    index: tuple[tuple[int, int], ...], start: int, stop: int
) -> tuple[tuple[Any, ...], Any]:
    """Where rows start..stop of an array meet the shard at `index`.

    (slices of the shard, slices of the rows), or ((), None) if they do not.
    """
    if not index:
        return (), ()
    first, last = max(start, index[0][0]), min(stop, index[0][1])
    if first >= last:
        return (), None
    into = slice(first - index[0][0], last - index[0][0])
    inner = tuple(slice(*bounds) for bounds in index[1:])
    return (into,), (slice(first - start, last - start), *inner)


def _flat(values: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(values, sep=".")
