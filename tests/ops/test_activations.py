"""SiTU and SwiGLU: published values, bounds and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kimi_jax.ops import activations

BETA, LINEAR_BETA = 4.0, 25.0
situ = jax.jit(activations.situ, static_argnums=(2, 3))
swiglu = jax.jit(activations.swiglu)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 1.0, 0.71582),
        (4.0, 10.0, 28.41623),
        (-2.0, 3.0, -0.65787),
        (100.0, 100.0, 99.93293),
    ],
)
def test_situ_values(gate, up, expected):
    value = situ(jnp.float32(gate), jnp.float32(up), BETA, LINEAR_BETA)
    assert abs(float(value) - expected) < 1e-5


def test_situ_is_bounded_by_the_product_of_the_caps():
    values = np.float32([-1e30, -1e3, -3.0, 0.0, 3.0, 1e3, 1e30])
    y = np.asarray(situ(*np.meshgrid(values, values), BETA, LINEAR_BETA))
    assert np.all(np.abs(y) <= BETA * LINEAR_BETA)
    assert y.max() == BETA * LINEAR_BETA


def test_situ_becomes_swiglu_as_the_caps_grow():
    with jax.enable_x64(True):
        g, u = jnp.linspace(-6, 6, 25), jnp.linspace(5, -7, 25)
        # tanh(x/b) b = x - x^3 / 3 b^2: at |x| <= 7 and b = 1e5 that is 1.2e-8.
        np.testing.assert_allclose(situ(g, u, 1e5, 1e5), swiglu(g, u), atol=2e-7)
        small = 1e-3 * g
        np.testing.assert_allclose(
            situ(small, small, BETA, LINEAR_BETA), swiglu(small, small), rtol=1e-5
        )


def test_swiglu_matches_numpy():
    with jax.enable_x64(True):
        g, u = np.linspace(-6, 6, 25), np.linspace(5, -7, 25)
        y = swiglu(jnp.asarray(g), jnp.asarray(u))
        np.testing.assert_allclose(y, g / (1 + np.exp(-g)) * u, rtol=1e-14)


def test_gradients():
    with jax.enable_x64(True):
        args = jnp.linspace(-6.0, 6.0, 9), jnp.linspace(30.0, -30.0, 9)
        check_grads(lambda g, u: situ(g, u, BETA, LINEAR_BETA), args, 1, "rev")
        check_grads(swiglu, args, 1, "rev")


@pytest.mark.parametrize("name", ["situ", "swiglu"])
def test_bfloat16_is_rounded_once(name):
    def f(g, u):
        return situ(g, u, BETA, LINEAR_BETA) if name == "situ" else swiglu(g, u)

    rng = np.random.default_rng(0)
    g, u = (jnp.asarray(3 * rng.normal(size=512), jnp.bfloat16) for _ in range(2))
    y = f(g, u)
    assert y.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        exact = f(g.astype(jnp.float64), u.astype(jnp.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2.0**-8)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"gate has shape \(2,\) and up \(3,\)"):
        swiglu(jnp.ones(2), jnp.ones(3))
    with pytest.raises(ValueError, match="linear_beta=0"):
        situ(jnp.ones(2), jnp.ones(2), 4.0, 0.0)
