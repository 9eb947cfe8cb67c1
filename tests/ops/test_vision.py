"""Places, positions, rotation and merging of patches, against plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import vision
from tests.modules import vision_reference as reference

GRIDS = np.array([[[1, 2, 4], [3, 4, 2], [0, 0, 0]], [[2, 2, 2], [0] * 3, [0] * 3]])
P = 36


@pytest.fixture(scope="module")
def places():
    return vision.locate(jnp.asarray(GRIDS), P, 2)


def test_places_count_through_each_item(places):
    for row, grids in enumerate(GRIDS):
        want, merged = [], 0
        for item, (t, h, w) in enumerate(grids, start=1):
            for f, y, x in np.ndindex(t, h, w):
                joins = merged + (y // 2) * (w // 2) + x // 2
                want.append((item, f, y, x, t, h, w, joins))
            merged += h * w // 4
        got = np.stack([np.asarray(x[row]) for x in places], axis=-1)
        np.testing.assert_array_equal(got[: len(want)], want)
        padding = (0, 0, 0, 0, 1, 1, 1, P)
        assert (got[len(want) :] == padding).all() and len(got) == P


def test_a_full_row_has_no_padding():
    full = vision.locate(jnp.array([[[1, 2, 2], [1, 2, 2]]]), 8, 2)
    np.testing.assert_array_equal(full.item_BP, [[1] * 4 + [2] * 4])


def test_positions_are_resized_as_torch_does(places):
    table = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    got = np.asarray(vision.grid_positions(jnp.asarray(table), places))
    start = 0
    for t, h, w in GRIDS[0, :2]:
        want = np.tile(reference.resize(table, h, w).reshape(h * w, 2), (t, 1))
        np.testing.assert_allclose(got[0, start : start + len(want)], want, atol=1e-6)
        start += len(want)


def test_an_item_of_the_tables_size_gets_the_table():
    table = jnp.arange(48.0).reshape(4, 6, 2)
    places = vision.locate(jnp.array([[[1, 4, 6]]]), 24, 2)
    got = vision.grid_positions(table, places)
    np.testing.assert_array_equal(got[0], table.reshape(24, 2))


def test_only_clips_have_a_time_code(places):
    code = np.asarray(vision.time_code(places, 4, 6))
    assert not code[0, :8].any() and not code[0, 32:].any()
    want = np.repeat(reference.time_code(3, 6), 8, axis=0)
    np.testing.assert_allclose(code[0, 8:32], want, atol=1e-6)


def test_rotation_turns_pairs_by_x_and_y(places):
    z = np.random.default_rng(1).normal(size=(2, P, 2, 8)).astype(np.float32)
    got = np.asarray(vision.rotate_in_plane(jnp.asarray(z), places, 100.0))
    for p in range(P):
        y, x = int(places.y_BP[0, p]), int(places.x_BP[0, p])
        want = reference.turn(z[0, p, 1].astype(float), y, x, 100.0)
        np.testing.assert_allclose(got[0, p, 1], want, atol=1e-6)


def test_squares_are_merged_and_frames_averaged(places):
    x = np.random.default_rng(2).normal(size=(2, P, 3)).astype(np.float32)
    got = np.asarray(vision.pool_and_merge(jnp.asarray(x), places, 2))
    parts = [
        reference.merge(x[0, :8].reshape(1, 2, 4, 3), 2),
        reference.merge(x[0, 8:32].reshape(3, 4, 2, 3), 2),
    ]
    want = np.concatenate(parts)
    np.testing.assert_allclose(got[0, : len(want)], want, atol=1e-6)
    assert got.shape == (2, P // 4, 12) and not got[0, len(want) :].any()


def test_features_go_where_they_are_marked():
    x = jnp.zeros((2, 4, 1))
    here = jnp.array([[True, False, True, False], [False] * 4])
    got = vision.put_features(x - 1, here, jnp.array([[[5.0], [6.0]], [[7.0], [8.0]]]))
    np.testing.assert_array_equal(got[..., 0], [[5, -1, 6, -1], [-1] * 4])
