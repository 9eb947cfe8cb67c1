"""RMSNorm and gated RMSNorm against float64 numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kimi_jax.ops import norms

EPS = 1e-5


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def numpy_norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain


def test_rms_norm_matches_numpy_in_float64():
    x, gain = 3 * draw(2, 5, 8), draw(8, seed=1)
    with jax.enable_x64(True):
        y = norms.rms_norm(jnp.asarray(x), jnp.asarray(gain), EPS)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, numpy_norm(x, gain), rtol=1e-14)
        plain = norms.rms_norm(jnp.asarray(x), None, EPS)
        np.testing.assert_allclose(plain, numpy_norm(x, 1.0), rtol=1e-14)


def test_gated_norm_matches_numpy_in_float64():
    x, gate, gain = draw(2, 3, 2, 8), draw(2, 3, 2, 8, seed=1), draw(8, seed=2)
    with jax.enable_x64(True):
        y = norms.gated_rms_norm(*map(jnp.asarray, (x, gate, gain)), EPS)
        np.testing.assert_allclose(
            y, numpy_norm(x, gain) / (1 + np.exp(-gate)), rtol=1e-14, atol=1e-16
        )


def test_no_gate_is_rms_norm():
    x, gain = jnp.asarray(draw(2, 3, 8)), jnp.asarray(draw(8, seed=1))
    chex.assert_trees_all_equal(
        norms.gated_rms_norm(x, None, gain, EPS), norms.rms_norm(x, gain, EPS)
    )


def test_gradients():
    with jax.enable_x64(True):
        args = tuple(map(jnp.asarray, (draw(2, 6), draw(2, 6, seed=1), draw(6))))
        check_grads(jax.jit(lambda *a: norms.gated_rms_norm(*a, EPS)), args, 1, "rev")


def test_bfloat16_is_rounded_once():
    # 2^12 squares of about 1 summed in bfloat16 would stop growing at 2^8.
    x = jnp.asarray(draw(4, 4096), jnp.bfloat16)
    gate, gain = x[::-1], jnp.asarray(draw(4096, seed=1), jnp.bfloat16)
    y = norms.gated_rms_norm(x, gate, gain, EPS)
    assert y.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in (x, gate, gain)]
    expected = numpy_norm(wide[0], wide[2]) / (1 + np.exp(-wide[1]))
    # Half a unit in the last of the 8 significant bits of bfloat16.
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2.0**-8)


def test_zero_rows_stay_finite():
    grad = jax.jit(jax.grad(lambda x: norms.rms_norm(x, None, EPS).sum()))
    grad = grad(jnp.zeros((2, 4)))
    np.testing.assert_allclose(grad, np.full((2, 4), EPS**-0.5), rtol=1e-6)


def test_bad_shapes_are_named():
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"gain has shape \(3,\)"):
        norms.rms_norm(x, jnp.ones(3), EPS)
    with pytest.raises(ValueError, match=r"gate has shape \(2, 3, 1\)"):
        norms.gated_rms_norm(x, jnp.ones((2, 3, 1)), None, EPS)
