"""What is stored comes back to the bit, and what cannot be stored is refused."""

import math

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.rl import storage


def test_trees_come_back_as_they_were():
    tree = {
        "numbers": [1, 0.1, -0.0, math.inf, True, None],
        "pair": (1, ("a", b"\0\xff")),
        "": {"=": "not a kind"},
        "arrays": [
            np.arange(6, dtype=np.int32).reshape(2, 3),
            np.array([0.1, math.nan], np.float32),
            np.array([1.5, -2.0], ml_dtypes.bfloat16),
            np.zeros((0, 4), np.uint8),
            np.array(True),
        ],
    }
    got = storage.from_bytes(storage.to_bytes(tree))
    for a, b in zip(got.pop("arrays"), tree.pop("arrays"), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        assert a.flags.writeable
    assert got == tree and math.copysign(1, got["numbers"][2]) == -1
    assert isinstance(got["pair"][1], tuple)


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object()])
def test_other_kinds_are_refused(value):
    with pytest.raises(TypeError, match="cannot store"):
        storage.to_bytes([value])


def test_bytes_that_are_no_tree():
    whole = storage.to_bytes({"a": np.arange(4)})
    for broken in (b"", whole[:9], whole[:-3], b"\1" + whole[1:]):
        with pytest.raises(UserError, match="resume from an older checkpoint"):
            storage.from_bytes(broken)
