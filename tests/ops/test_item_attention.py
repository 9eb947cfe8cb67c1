"""Attention inside items equals a plain masked softmax, gradients included."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.item_attention import item_attention, item_bounds

# Items across tile borders, one of a single patch, padding in front and behind.
ITEMS = np.array([[1] * 5 + [2] + [3] * 11 + [0] * 3, [0] * 2 + [4] * 18], np.int32)


def plain(q, k, v):
    same = (ITEMS[:, :, None] == ITEMS[:, None, :])[:, None]
    scores = jnp.where(same, jnp.einsum("bphk,bshk->bhps", q, k) * 0.5, -jnp.inf)
    o = jnp.einsum("bhps,bshk->bphk", jax.nn.softmax(scores, -1), v)
    return jnp.where((ITEMS > 0)[..., None, None], o, 0)


@pytest.mark.parametrize("block_size", [4, 32])
def test_equals_a_masked_softmax_in_float64(block_size):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        *qkv, probe = (jnp.asarray(rng.normal(size=(2, 20, 3, 4))) for _ in range(4))

        def tiled(q, k, v):
            return item_attention(q, k, v, ITEMS, scale=0.5, block_size=block_size)

        def results(attend):
            loss = lambda *x: jnp.sum(attend(*x) * probe)  # noqa: E731
            return jax.jit(attend)(*qkv), jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)

        chex.assert_trees_all_close(results(tiled), results(plain), rtol=0, atol=1e-13)


def test_bounds_of_items():
    first, last = item_bounds(jnp.array([[1, 1, 2, 0, 0, 3]]))
    np.testing.assert_array_equal(first, [[0, 0, 2, 3, 4, 5]])
    np.testing.assert_array_equal(last, [[1, 1, 2, 3, 4, 5]])


def test_ids_must_fit():
    x = jnp.zeros((1, 4, 1, 4))
    with pytest.raises(ValueError, match=r"expected \[B, T\] = \(1, 4\)"):
        item_attention(x, x, x, jnp.ones((1, 3), int), scale=1.0, block_size=4)
