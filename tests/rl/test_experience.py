"""Every token of every trajectory arrives once, with what belongs to it."""

import dataclasses

import jax
import numpy as np
import pytest

from kimi_jax import sharding
from kimi_jax.rl.experience import experience_shape, make_experience, on_mesh
from tests import tiny
from tests.rl import trajectories

T, ROWS = 24, 3
ROUTES = (2, 2, 4)


def many(seed=0, count=9):
    rng = np.random.default_rng(seed)
    made = [
        trajectories.draw(rng, rng.integers(1, 4, size=1 + i % 3), i // 2, ROUTES)
        for i in range(count)
    ]
    credit = [rng.normal(size=len(one.turns)) for one in made]
    return made, credit


def found_in(packed):
    """[(tokens, weights, advantages, behaviour, routes)] of every segment."""
    found = []
    for batch in packed.batches:
        for row in range(len(batch.tokens_BT)):
            ids = batch.segment_ids_BT[row]
            assert set(np.unique(ids)) - {0} == set(range(1, ids.max() + 1))
            for segment in range(1, ids.max() + 1):
                here = ids == segment
                assert np.ptp(np.flatnonzero(here)) == here.sum() - 1
                tokens = batch.tokens_BT[row, here]
                targets = batch.targets_BT[row, here]
                np.testing.assert_array_equal(tokens[1:], targets[:-1])
                rest = (
                    batch.weights_BT,
                    batch.advantages_BT,
                    batch.behaviour_BT,
                    batch.routes_BTLA,
                )
                whole = [*tokens.tolist(), int(targets[-1])]
                found.append((whole, *(x[row, here] for x in rest)))
    return found


@pytest.mark.parametrize("batches", [None, 4])
def test_what_goes_in_comes_out(batches):
    made, credit = many()
    packed = make_experience(made, credit, T, ROWS, batches=batches, replay=ROUTES)
    assert sorted(packed.used) == list(range(9)) and not packed.left
    assert batches is None or len(packed.batches) == batches
    assert sum(packed.dropped.values()) == 0
    by_tokens = {tuple(tokens): rest for tokens, *rest in found_in(packed)}
    assert len(by_tokens) == 9
    for one, value_N in zip(made, credit, strict=True):
        weights, advantages, behaviour, routes = by_tokens[tuple(one.tokens)]
        want = np.zeros((3, len(one.tokens)))
        done = 0
        for turn, value in zip(one.turns, value_N, strict=True):
            for at in range(turn.start, turn.stop):
                want[:, at] = 1, value, one.logprobs[done]
                done += 1
        got = np.stack([weights, advantages, behaviour])
        np.testing.assert_array_equal(got, want[:, 1:].astype(np.float32))
        np.testing.assert_array_equal(routes, one.routes)
    last = packed.batches[-1]
    assert (last.routes_BTLA[last.segment_ids_BT == 0] == ROUTES[2]).all()


def test_what_is_not_finite_is_dropped_and_counted():
    made, credit = many()
    made[0].logprobs[0] = -np.inf
    made[1].turns[-1].reward = np.nan
    credit[2] = np.nan
    made[3] = dataclasses.replace(made[3], turns=[], logprobs=[])
    made[4] = trajectories.draw(np.random.default_rng(1), [T])
    packed = make_experience(made, credit, T, ROWS)
    assert packed.dropped == {"empty": 1, "not_finite": 3, "too_long": 1}
    assert sorted(packed.used) == [5, 6, 7, 8]
    for batch in packed.batches:
        assert batch.routes_BTLA is None
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(batch))


def test_what_has_no_room_is_named():
    made, credit = many()
    packed = make_experience(made, credit, T, 1, batches=2)
    assert packed.left and sorted(packed.used + packed.left) == list(range(9))
    nothing = make_experience([], [], T, ROWS)
    assert len(nothing.batches) == 1 and not nothing.batches[0].weights_BT.any()


def test_routes_may_be_missing():
    made, credit = many(count=2)
    made[0].routes = None
    (batch,) = make_experience(made, credit, 64, 1, replay=ROUTES).batches
    ids = batch.segment_ids_BT
    free = (batch.routes_BTLA == ROUTES[2]).all(axis=(2, 3))
    assert len(np.unique(ids[free & (ids > 0)])) == 1 and not free[ids > 0].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [0.0]}, "one for each"),
        ({"turns": [trajectories.Turn(0, 3, 0.0)], "logprobs": [0.0] * 3}, "a turn"),
        ({"turns": [trajectories.Turn(5, 99, 0)], "logprobs": [0.0] * 94}, "5 to 99"),
        ({"routes": np.zeros((3, 2, 2), int)}, "the routes of a trajectory"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change, message):
    made, credit = many(count=3)
    made[2] = dataclasses.replace(made[2], **change)
    with pytest.raises(ValueError, match=message):
        make_experience(made, credit, T, ROWS, replay=ROUTES)


def test_it_lies_on_a_mesh_as_announced():
    mesh = sharding.make_mesh(tiny.make("mesh.data=2", "mesh.context=2"))
    rows = sharding.batch_sharding(mesh)
    made, credit = many()
    packed = make_experience(made, credit, T, 4, replay=ROUTES)
    placed = on_mesh(packed.batches[0], rows)
    shapes = experience_shape(T, 4, rows, replay=ROUTES)
    assert jax.tree.structure(placed) == jax.tree.structure(shapes)
    for got, want in zip(*map(jax.tree.leaves, (placed, shapes)), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert got.sharding == want.sharding
