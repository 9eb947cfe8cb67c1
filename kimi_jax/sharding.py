"""The device mesh, and how a batch and the state lie on it."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax.config import Config
from kimi_jax.errors import UserError


def make_mesh(config: Config) -> Mesh:
    """A mesh with the axis "data", over which the rows of a batch are split.

    Raises:
      UserError: more devices than there are, or rows that cannot be split evenly.
    """
    devices = jax.devices()
    size = len(devices) if config.mesh.data == -1 else config.mesh.data
    if size > len(devices):
        raise UserError(
            f"config.mesh.data={size}: only {len(devices)} {devices[0].platform} "
            f"devices are present; use --config.mesh.data=-1 for all of them"
        )
    rows = config.train.batch_size // config.train.micro_batches
    if rows % size:
        legal = max(n for n in range(1, size + 1) if rows % n == 0)
        raise UserError(
            f"config.mesh.data={size}: does not divide the {rows} rows of a "
            f"micro-batch; try --config.mesh.data={legal} or another "
            "config.train.batch_size"
        )
    grid = np.array(devices[:size])
    return Mesh(grid, ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Rows of a [B, ...] array over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))
