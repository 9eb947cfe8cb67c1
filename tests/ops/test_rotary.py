"""Rotary positions: only differences of positions reach the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.rotary import positions_in_segments, rotate

BASE = 10_000.0
turn = jax.jit(rotate, static_argnums=2)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def scores(q, k, positions):
    q, k = turn(q, positions, BASE), turn(k, positions, BASE)
    return jnp.einsum("bthr,bshr->bhts", q, k)


def test_scores_depend_on_relative_position_only():
    with jax.enable_x64(True):
        q, k = draw(1, 6, 2, 8), draw(1, 6, 2, 8, seed=1)
        positions = jnp.arange(6)[None]
        here = scores(q, k, positions)
        np.testing.assert_allclose(scores(q, k, positions + 1000), here, atol=1e-11)
        assert jnp.abs(scores(q, k, 2 * positions) - here).max() > 0.1


def test_matches_complex_multiplication():
    with jax.enable_x64(True):
        x, positions = draw(2, 5, 3, 8), jnp.arange(10).reshape(2, 5)
        z = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
        angle = np.asarray(positions)[:, :, None, None] * BASE ** (-np.arange(4) / 4)
        z = z * np.exp(1j * angle)
        expected = np.concatenate([z.real, z.imag], axis=-1)
        np.testing.assert_allclose(turn(x, positions, BASE), expected, atol=1e-14)


def test_packed_document_is_rotated_as_if_alone():
    x = draw(1, 7, 2, 4).astype(jnp.float32)
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2]], jnp.int32)
    packed = turn(x, positions_in_segments(ids), BASE)
    alone = turn(x[:, 3:], jnp.arange(4)[None], BASE)
    np.testing.assert_array_equal(packed[:, 3:], alone)


def test_bfloat16_in_bfloat16_out():
    x = draw(1, 3, 1, 4).astype(jnp.bfloat16)
    y = turn(x, jnp.arange(3)[None], BASE)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y[:, 0], x[:, 0])


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match="rotary width is 3"):
        rotate(jnp.ones((1, 2, 1, 3)), jnp.zeros((1, 2)), BASE)
    with pytest.raises(ValueError, match=r"positions \(2, 1\)"):
        rotate(jnp.ones((1, 2, 1, 4)), jnp.zeros((2, 1)), BASE)
