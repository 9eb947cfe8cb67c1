"""Statistics of KDA's gates against sorting all values, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import decay

B, T, H, K, V = 3, 70, 2, 4, 5


def draw(bound):
    """Gates, states and packed rows, the last of which is all padding."""
    rng = np.random.default_rng(0)
    g, beta = rng.normal(-1, 4, (B, T, H, K)), rng.normal(size=(B, T, H))
    state = rng.normal(size=(B, H, K, V))
    ids = np.ones((B, T), np.int32)
    ids[0, 50:], ids[2] = 0, 0
    g[ids == 0] = np.nan  # padding may hold anything
    a_log, dt_bias = rng.normal(0, 0.3, H), rng.normal(size=H * K)
    logits = np.where(ids[..., None, None] > 0, g, 0) + dt_bias.reshape(H, K)
    slope = np.exp(a_log)[:, None]
    if bound is None:
        log_alpha = -slope * np.log1p(np.exp(logits))
    else:
        log_alpha = bound / (1 + np.exp(-slope * logits))
    sampled = (ids > 0) & (np.arange(T) % 3 == 0)  # 70 positions, 32 at most
    return (g, beta, state, ids, a_log, dt_bias), log_alpha, sampled


@functools.partial(jax.jit, static_argnums=6)
def observe(g, beta, state, ids, a_log, dt_bias, bound):
    square_B = jnp.mean(jnp.square(state), (1, 2, 3))
    return decay.observe(
        g, beta, square_B, ids, a_log_H=a_log, dt_bias=dt_bias, lower_bound=bound
    )


@pytest.mark.parametrize("bound", [-5.0, None])
def test_sums_equal_their_definitions(bound):
    args, log_alpha, sampled = draw(bound)
    with jax.enable_x64(True):
        got = {k: np.array(x) for k, x in observe(*args, bound).items()}
    assert got["sampled"] == sampled.sum() == 17 + 24
    chosen = log_alpha[sampled]
    above = [(-chosen > edge).mean((1, 2)).sum() for edge in decay.EDGES]
    np.testing.assert_allclose(got["decay_above_Q"], above, rtol=1e-13)
    beta = 1 / (1 + np.exp(-args[1][sampled]))
    np.testing.assert_allclose(got["beta"], beta.mean(1).sum(), rtol=1e-13)
    squares = np.square(args[2][:2]).mean((1, 2, 3)).sum()
    np.testing.assert_allclose(got["state_square"], squares, rtol=1e-13)
    assert got["state_rows"] == 2
    real = np.where((args[3] > 0)[..., None, None], -log_alpha, 0)
    tiles = [real[:, start : start + 16].sum(1).max() for start in (0, 32)]
    np.testing.assert_allclose(got["tile_decay"], max(tiles), rtol=1e-13)
    assert ("at_bound" in got) == (bound is not None)
    if bound is not None:
        at_bound = (chosen < 0.99 * bound).mean((1, 2)).sum()
        np.testing.assert_allclose(got["at_bound"], at_bound, rtol=1e-13)
        assert at_bound > 0


def test_a_row_shorter_than_a_tile_has_its_own_decay():
    g = jnp.full((1, 5, 1, 2), 30.0)
    got = decay.observe(
        g,
        jnp.zeros((1, 5, 1)),
        jnp.zeros(1),
        None,
        a_log_H=jnp.zeros(1),
        dt_bias=jnp.zeros(2),
        lower_bound=-5.0,
    )
    np.testing.assert_allclose(got["tile_decay"], 25.0, rtol=1e-6)


@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.95])
def test_quantiles_are_those_of_sorted_values(quantile):
    rng = np.random.default_rng(1)
    decays = np.exp(rng.normal(-3, 1.5, 20000))
    above_Q = (decays[:, None] > decay.EDGES).mean(0)
    got = decay.alpha_quantile(above_Q, quantile)
    want = np.quantile(np.exp(-decays), quantile)
    np.testing.assert_allclose(np.log(got), np.log(want), rtol=0.03)


def test_decays_beyond_the_edges_count_as_the_edges():
    none, all_of_them = np.zeros(len(decay.EDGES)), np.ones(len(decay.EDGES))
    assert decay.alpha_quantile(none, 0.5) == pytest.approx(np.exp(-(2.0**-14)))
    assert decay.alpha_quantile(all_of_them, 0.5) == pytest.approx(np.exp(-8))
