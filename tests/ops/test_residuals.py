"""The depth mix against a list of sources, in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.residuals import (
    inverse_rms,
    mix_reference,
    mix_sources,
    total_depth_weights,
    total_mean_square,
)

S, B, T, D = 4, 2, 3, 8
EPS = 1e-5


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(seed=0, S=S):
    rng = np.random.default_rng(seed)
    shapes = (S, B, T, D), (B, T, D), (D,), (D,)
    return tuple(rng.normal(size=shape) for shape in shapes)


def projection(h, weights):
    """A scalar that sees every entry of both outputs."""
    rng = np.random.default_rng(9)
    dweights = jnp.asarray(rng.normal(size=weights.shape))
    return jnp.sum(jnp.asarray(rng.normal(size=h.shape)) * h) + jnp.sum(
        dweights * weights
    )


@jax.jit
def run(bank, num_sources, partial, has_partial, query, gain):
    """Value, outputs and gradients, with the inverse RMS taken inside and outside."""

    def loss(bank, partial, query, gain, outside):
        r = inverse_rms(bank, EPS) if outside else None
        h, weights = mix_sources(
            bank,
            num_sources,
            partial,
            has_partial,
            query,
            gain,
            EPS,
            inverse_rms_SBT=r,
        )
        return projection(h, weights), (h, weights)

    def grads(outside):
        grad = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
        return grad(bank, partial, query, gain, outside)

    return grads(False), grads(True)


def expected(bank, n, partial, has_partial, query, gain):
    def loss(bank, partial, query, gain):
        sources = list(bank[:n]) + ([partial] if has_partial else [])
        h, weights = mix_reference(sources, query, gain, EPS)
        padded = jnp.zeros((S + 1, B, T)).at[:n].set(weights[:n])
        if has_partial:
            padded = padded.at[S].set(weights[n])
        return projection(h, padded), (h, padded)

    grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    return grad(bank, partial, query, gain)


@pytest.mark.parametrize(
    ("n", "has_partial"), [(S, True), (2, True), (3, False), (0, True), (1, False)]
)
def test_value_and_gradient_match_the_list(n, has_partial):
    bank, partial, query, gain = draw()
    want = expected(bank, n, partial, has_partial, query, gain)
    for got in run(bank, np.int32(n), partial, has_partial, query, gain):
        chex.assert_trees_all_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("n", "has_partial"), [(2, True), (3, False)])
def test_rows_not_in_use_may_hold_anything(n, has_partial):
    bank, partial, query, gain = draw()
    clean = run(bank, np.int32(n), partial, has_partial, query, gain)
    bank[n:] = np.array([np.nan, np.inf])[np.arange(S - n) % 2, None, None, None]
    if not has_partial:
        partial[:] = np.nan
    dirty = run(bank, np.int32(n), partial, has_partial, query, gain)
    chex.assert_trees_all_equal(clean, dirty)


@pytest.mark.parametrize(("n", "has_partial"), [(1, False), (0, True)])
def test_one_source_passes_through_exactly(n, has_partial):
    bank, partial, query, gain = draw()
    (_, (h, weights)), grads = run(
        bank, np.int32(n), partial, has_partial, query, gain
    )[0]
    chex.assert_trees_all_equal(h, partial if has_partial else bank[0])
    assert np.all(weights.sum(axis=0) == 1) and np.all(np.isin(weights, (0, 1)))
    chex.assert_trees_all_equal(grads[2:], (np.zeros(D), np.zeros(D)))


def test_zero_query_gives_the_uniform_mean():
    bank, partial, query, gain = draw()
    (_, (h, weights)), _ = run(bank, np.int32(2), partial, True, 0 * query, gain)[0]
    np.testing.assert_allclose(h, (bank[0] + bank[1] + partial) / 3, rtol=1e-14)
    np.testing.assert_allclose(weights[np.array([0, 1, 4])], 1 / 3, rtol=1e-14)
    np.testing.assert_array_equal(weights[2:4], 0)


def test_more_rows_than_the_unrolling():
    bank, partial, query, gain = draw(S=19)
    mix = jax.jit(lambda *args: mix_sources(*args, EPS))
    h, _ = mix(bank, 17, partial, True, query, gain)
    want, _ = jax.jit(mix_reference)([*bank[:17], partial], query, gain, EPS)
    np.testing.assert_allclose(h, want, rtol=1e-12)


def test_large_scores_do_not_overflow():
    bank, partial, query, gain = draw()
    got = run(bank, np.int32(S), partial, True, 1e5 * query, gain)
    chex.assert_tree_all_finite(got)


def test_inverse_rms_matches_numpy_and_autodiff():
    x = draw()[1]
    r, pullback = jax.vjp(jax.jit(lambda x: inverse_rms(x, EPS)), x)
    np.testing.assert_allclose(r, 1 / np.sqrt((x**2).mean(-1) + EPS), rtol=1e-14)
    plain = jax.grad(lambda x: (2 * (jnp.mean(x**2, -1) + EPS) ** -0.5).sum())
    np.testing.assert_allclose(pullback(2 * jnp.ones_like(r))[0], plain(x), rtol=1e-12)


def test_bfloat16_sources_are_mixed_in_float32():
    bank, partial, query, gain = draw()
    low = jnp.asarray(bank, jnp.bfloat16), jnp.asarray(partial, jnp.bfloat16)
    args = low[0], S, low[1], True, np.float32(query), np.float32(gain)

    def loss(bank, partial):
        h, weights = mix_sources(bank, S, partial, *args[3:], EPS)
        return h.astype(jnp.float32).sum(), (h, weights)

    grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (dbank, dpartial), (h, weights) = grad(*low)
    assert h.dtype == dbank.dtype == dpartial.dtype == jnp.bfloat16
    assert weights.dtype == jnp.float32
    sources = [x.astype(jnp.float64) for x in (*low[0], low[1])]
    want, want_weights = mix_reference(sources, query, gain, EPS)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
    # One final rounding to 8 bits; the absolute part covers cancelled sums in float32.
    np.testing.assert_allclose(np.float64(h), want, rtol=2.0**-8, atol=1e-5)


def test_total_mean_square_skips_padding():
    x_BTD = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    ids_BT = np.array([[1, 1, 2, 0, 0], [1, 0, 0, 0, 0]])
    want = (x_BTD.astype(np.float64) ** 2).mean(axis=-1)
    got = total_mean_square(jnp.asarray(x_BTD), jnp.asarray(ids_BT))
    np.testing.assert_allclose(got, want[ids_BT > 0].sum(), rtol=1e-6)
    np.testing.assert_allclose(
        total_mean_square(jnp.asarray(x_BTD)), want.sum(), rtol=1e-6
    )
    gradient = jax.grad(lambda x: total_mean_square(x))(jnp.asarray(x_BTD))
    assert not np.any(gradient)


def test_total_depth_weights_skip_padding():
    weights = np.random.default_rng(0).dirichlet(np.ones(S + 1), size=(B, T))
    weights = np.moveaxis(weights, -1, 0)
    ids = np.int32([[1, 1, 0], [0, 2, 2]])
    got = total_depth_weights(weights, jnp.asarray(ids))
    np.testing.assert_allclose(got, weights[:, ids > 0].sum(-1), rtol=1e-14)
    np.testing.assert_allclose(got.sum(), 4, rtol=1e-14)
    got = total_depth_weights(jnp.asarray(weights))
    np.testing.assert_allclose(got, weights.sum((1, 2)), rtol=1e-14)
    assert not np.any(total_depth_weights(weights, jnp.zeros((B, T), jnp.int32)))


def test_bad_arguments_are_named():
    bank, partial, query, gain = draw()
    with pytest.raises(ValueError, match=r"bank has shape \(4, 2, 3, 8\) and partial"):
        mix_sources(bank, 1, partial[:1], True, query, gain, EPS)
    with pytest.raises(ValueError, match=r"query has shape \(7,\)"):
        mix_sources(bank, 1, partial, True, query[:7], gain, EPS)
    with pytest.raises(ValueError, match="inverse_rms_SBT has shape"):
        mix_sources(bank, 1, partial, True, query, gain, EPS, inverse_rms_SBT=partial)
    with pytest.raises(ValueError, match="num_sources is 5, expected 0 to S=4"):
        mix_sources(bank, 5, partial, True, query, gain, EPS)
    with pytest.raises(ValueError, match="at least one source"):
        mix_sources(bank, 0, partial, False, query, gain, EPS)
