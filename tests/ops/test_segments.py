"""Where documents start: against a loop over tokens."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import segments

IDS = np.array(
    [
        [1, 1, 1, 2, 2, 3, 0, 0],
        [0, 0, 5, 5, 0, 5, 5, 5],  # a gap ends a document even if the id returns
        [1, 1, 2, 2, 1, 1, 1, 1],  # so does another document
        [0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)


def test_starts_and_positions_match_a_loop():
    starts = np.full(IDS.shape, IDS.shape[1])
    positions = np.zeros(IDS.shape, int)
    for b, row in enumerate(IDS):
        for t, segment in enumerate(row):
            if segment:
                s = t
                while s > 0 and row[s - 1] == segment:
                    s -= 1
                starts[b, t], positions[b, t] = s, t - s
    got = jax.jit(segments.document_starts)(IDS)
    chex.assert_trees_all_equal(np.asarray(got), starts.astype(np.int32))
    got = jax.jit(segments.positions_in_segments)(IDS)
    chex.assert_trees_all_equal(np.asarray(got), positions.astype(np.int32))


def test_one_token_rows():
    got = jax.jit(segments.document_starts)(np.array([[4], [0]]))
    np.testing.assert_array_equal(got, [[0], [1]])


@pytest.mark.parametrize(
    "ids", [jnp.ones((4,), jnp.int32), jnp.ones((2, 4), jnp.float32)]
)
def test_bad_ids_are_named(ids):
    with pytest.raises(ValueError, match="segment_ids_BT"):
        segments.document_starts(ids)
