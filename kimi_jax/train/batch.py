"""A batch on its way from the loader to the mesh."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax import config
from kimi_jax.data import loader


class Batch(NamedTuple):
    """[B, T] arrays; segment 0 is padding, weight 0 is not predicted."""

    tokens_BT: jax.Array
    targets_BT: jax.Array
    segment_ids_BT: jax.Array
    weights_BT: jax.Array


def on_mesh(host: loader.Batch, rows: jax.sharding.NamedSharding) -> Batch:
    """`host` with its rows split over the mesh."""
    names = ("tokens", "targets", "segment_ids", "weights")
    return Batch(*(jax.device_put(host[name], rows) for name in names))


def batch_shape(train: config.Train, rows: jax.sharding.NamedSharding) -> Batch:
    """What the steps are compiled for, before there is a batch."""
    shape = (train.batch_size, train.seq_len)
    dtypes = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    leaves = [jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in dtypes]
    return Batch(*leaves)  # type: ignore[arg-type]
