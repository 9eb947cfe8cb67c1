"""Which rows a process reads, and where the mesh puts them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.errors import UserError
from kimi_jax.train import batch


def sharding(shape, names, *spec):
    count = int(np.prod(shape))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), names)
    return NamedSharding(mesh, PartitionSpec(*spec))


AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")


@pytest.mark.parametrize(
    "rows",
    [
        sharding((8,), ("data",), "data"),
        sharding((2, 1, 2, 2, 1), AXES, ROWS, "context"),
        sharding((1, 2, 1, 2, 2), AXES, ROWS, ("context", "tensor")),
        sharding((8,), ("data",)),
    ],
)
def test_one_process_reads_everything_and_every_device_has_its_part(rows):
    assert batch.share_of_rows(rows, 8) == batch.WHOLE == (0, 1)
    names = ("tokens", "targets", "segment_ids", "weights")
    host = {
        name: np.arange(96, dtype=np.int32).reshape(8, 12) + n
        for n, name in enumerate(names)
    }
    made = batch.by_name(batch.on_mesh(host, rows))
    assert list(made) == list(host)
    for name, x_BT in host.items():
        leaf = made[name]
        assert leaf.sharding == rows and leaf.dtype == x_BT.dtype
        np.testing.assert_array_equal(leaf, x_BT)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, x_BT[shard.index])


@pytest.mark.parametrize(
    ("held", "share"),
    [
        ([slice(4, 6), slice(6, 8)], (1, 2)),
        ([slice(2, 3), slice(3, 4), slice(2, 3)], (1, 4)),
        ([slice(None), slice(None)], (0, 1)),
    ],
)
def test_shares(held, share):
    assert batch.share_of_slices(held, 8) == share


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([slice(0, 2), slice(4, 6)], "0 to 1, 4 to 5 of 8; order the mesh"),
        ([slice(0, 3)], "hold rows 0 to 2 of 8, which is no equal share"),
        ([slice(1, 3)], "hold rows 1 to 2 of 8, which is no equal share"),
    ],
)
def test_shares_that_no_reader_can_read(held, words):
    with pytest.raises(UserError, match=words):
        batch.share_of_slices(held, 8)


def test_rows_that_cannot_be_split():
    with pytest.raises(UserError, match="batch_size=6: the rows cannot be split"):
        batch.share_of_rows(sharding((4,), ("data",), "data"), 6)
