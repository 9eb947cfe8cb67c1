"""The short convolution over a split time axis against the same call on one device."""

from functools import cache

import jax
import numpy as np
import pytest

from kimi_jax.ops.context_conv import context_short_conv
from kimi_jax.ops.conv import short_conv
from tests.ops.context_cases import (
    AXIS,
    SAME,
    SPLIT,
    assert_close,
    over,
    with_gradients,
)

W, C = 4, 3


def documents(T):
    """Long ones, short ones among padding, one that starts anywhere, and none."""
    rng = np.random.default_rng(0)
    ids = np.zeros((6, T), np.int32)
    ids[0] = np.sort(rng.integers(1, 4, T))
    ids[1] = rng.integers(0, 2, T)
    ids[2, 1:], ids[3, T // 2 + 1 :] = 1, 2
    ids[4] = np.arange(T) // 2 % 2 + 1
    return ids


def inputs(T, with_tail):
    draw = np.random.default_rng(1).normal
    x = {"x": draw(size=(6, T, C)), "w": draw(size=(C, W))}
    return x | ({"tail": draw(size=(6, W - 1, C))} if with_tail else {})


@cache
def runner(ranks, packed, with_tail):
    def single(x, ids):
        return short_conv(x["x"], x["w"], ids, x.get("tail"), True)

    def local(x, ids):
        return context_short_conv(x["x"], x["w"], ids, x.get("tail"), True, axis=AXIS)

    if ranks == 1:
        return with_gradients(single)
    specs = {"x": SPLIT, "w": SAME} | ({"tail": SAME} if with_tail else {})
    specs = specs, SPLIT if packed else None
    return with_gradients(over(ranks, local, specs, (SPLIT, SAME)))


@pytest.mark.parametrize(
    ("ranks", "piece", "packed", "with_tail"),
    [
        (2, 5, True, True),
        (8, 1, True, True),
        (8, 2, True, False),
        (4, 2, False, True),
        (4, 3, False, False),
    ],
)
def test_value_tail_and_gradients_equal_one_device(ranks, piece, packed, with_tail):
    T = ranks * piece
    ids = documents(T) if packed else None
    with jax.enable_x64(True):
        x = inputs(T, with_tail)
        got = runner(ranks, packed, with_tail)(x, ids)
        expected = runner(1, packed, with_tail)(x, ids)
        assert_close(got, expected, 1e-13)
        if with_tail and packed:
            # A row of padding hands the tail on.
            np.testing.assert_array_equal(got[0][1][-1], x["tail"][-1])


@pytest.mark.parametrize(("piece", "exchanges"), [(5, 1), (2, 2), (1, 3)])
def test_one_exchange_for_each_rank_that_the_halo_reaches(piece, exchanges):
    def local(x, w):
        return context_short_conv(x, w, axis=AXIS)

    run = over(8, local, (SPLIT, SAME), SPLIT)
    x, w = np.zeros((1, 8 * piece, C)), np.zeros((C, W))
    assert str(jax.make_jaxpr(run)(x, w)).count("ppermute[") == exchanges


def test_bad_shapes_are_named():
    run = over(
        2, lambda x, w: context_short_conv(x, w, axis=AXIS), (SPLIT, SAME), SPLIT
    )
    with pytest.raises(ValueError, match=r"w has shape \(4, 3\)"):
        jax.eval_shape(run, np.zeros((1, 8, C)), np.zeros((W, C)))
