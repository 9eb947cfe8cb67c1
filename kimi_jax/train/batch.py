"""A batch on its way from the loader to the mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import config
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.modules.vision import Media, patch_values

# The loader's names of the fields of a `Batch`, and of its `Media`.
_ROWS = ("tokens", "targets", "segment_ids", "weights")
_MEDIA = ("patches", "grids")


class Batch(NamedTuple):
    """[B, T] arrays; segment 0 is padding, weight 0 is not predicted.

    `media` is what the placeholders among the tokens show; None: rows have no room for
    images (config.train.row_patches=0).
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    segment_ids_BT: jax.Array
    weights_BT: jax.Array
    media: Media | None = None


class Share(NamedTuple):
    """Reader `reader` of `readers` equal ones: what `loader.Reader` takes."""

    reader: int
    readers: int


WHOLE = Share(0, 1)


def share_of_rows(rows: jax.sharding.NamedSharding, batch_size: int) -> Share:
    """The rows of a [B, T] batch that the devices of this process hold.

    Processes whose devices hold the same rows get the same share.

    Args:
      rows: how batches lie on the mesh; B over any of its axes, T over others or none.
      batch_size: B.

    Raises:
      UserError: the rows cannot be split, or are no equal, contiguous share.
    """
    return share_of_slices(_local_rows(rows, batch_size), batch_size)


def share_of_slices(held: Iterable[slice], batch_size: int) -> Share:
    """`share_of_rows`, given the rows of each device."""
    spans = sorted({span.indices(batch_size)[:2] for span in held})
    start, stop = spans[0][0], spans[-1][1]
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if end != begin:
            raise UserError(
                f"the devices of process {jax.process_index()} hold rows that are "
                f"apart: {_show(spans)} of {batch_size}; order the mesh so that the "
                "axes that split rows change slowest from device to device, or start "
                "one process for each device"
            )
    size = stop - start
    if batch_size % size or start % size:
        raise UserError(
            f"the devices of process {jax.process_index()} hold rows {start} to "
            f"{stop - 1} of {batch_size}, which is no equal share; give every process "
            "the same number of devices, or set the axes of config.mesh that split "
            "rows to multiples of the number of processes"
        )
    return Share(start // size, batch_size // size)


def on_mesh(
    host: loader.Batch, rows: jax.sharding.NamedSharding, share: Share = WHOLE
) -> Batch:
    """`host`, which holds `share` of the rows, as one array over the whole mesh."""

    def place(x_BT: np.ndarray, where: jax.sharding.NamedSharding) -> jax.Array:
        first = len(x_BT) * share.reader
        shape = (len(x_BT) * share.readers, *x_BT.shape[1:])

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return x_BT[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(shape, where, part)

    media = None
    if _MEDIA[0] in host:
        whole = _whole_rows(rows)
        media = Media(*(place(host[name], whole) for name in _MEDIA))
    tokens, targets, segment_ids, weights = (place(host[name], rows) for name in _ROWS)
    return Batch(tokens, targets, segment_ids, weights, media)


def by_name(batch: Batch) -> dict[str, jax.Array]:
    """The arrays of a batch under the names that the loader gives them."""
    *rows, media = batch
    arrays = dict(zip(_ROWS, rows, strict=True))
    return arrays if media is None else arrays | dict(zip(_MEDIA, media, strict=True))


def batch_shape(
    train: config.Train,
    rows: jax.sharding.NamedSharding,
    vision: config.Vision | None = None,
) -> Batch:
    """What the steps are compiled for, before there is a batch."""
    shape = (train.batch_size, train.seq_len)
    dtypes = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    leaves = [jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in dtypes]
    batch = Batch(*leaves)  # type: ignore[arg-type]
    if vision is not None and train.row_patches:
        B, values, whole = train.batch_size, patch_values(vision), _whole_rows(rows)
        patches, grids = (B, train.row_patches, values), (B, train.row_items, 3)
        shapes = ((patches, jnp.float32), (grids, jnp.int32))
        media = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes]
        batch = batch._replace(media=Media(*media))  # type: ignore[arg-type]
    return batch


def _whole_rows(rows: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """`rows` without its split of time: patches of one item attend to each other."""
    spec = jax.sharding.PartitionSpec(*rows.spec[:1])
    return jax.sharding.NamedSharding(rows.mesh, spec)


def _local_rows(rows: jax.sharding.NamedSharding, batch_size: int) -> list[slice]:
    parts = rows.spec[1] if len(rows.spec) > 1 else None
    axes = (parts,) if isinstance(parts, str) else tuple(parts or ())
    # As short as the split of time allows; only the rows are of interest.
    length = math.prod(rows.mesh.shape[axis] for axis in axes)
    try:
        held = rows.addressable_devices_indices_map((batch_size, length))
    except ValueError as error:
        raise UserError(
            f"config.train.batch_size={batch_size}: the rows cannot be split over the "
            f"mesh {dict(rows.mesh.shape)} as {rows.spec}; make it a multiple of the "
            "axes that split rows"
        ) from error
    if not held:
        raise UserError(
            f"no device of process {jax.process_index()} is in the mesh; set an axis "
            "of config.mesh to -1, so that it takes all devices"
        )
    return [index[0] for index in held.values() if index]


def _show(spans: list[tuple[int, int]]) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop in spans)
