"""Short convolution against one Python loop per document."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.conv import short_conv

IDS = np.array(
    [
        [1, 1, 1, 1, 1, 2, 3, 3, 3],
        [0, 0, 7, 7, 7, 0, 7, 0, 0],
        [4, 4, 4, 4, 4, 4, 4, 4, 4],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


conv = jax.jit(partial(short_conv, output_tail=True))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def documents(row):
    """Runs of equal positive ids: lists of token indices."""
    runs = []
    for t, segment in enumerate(row):
        if segment and t and row[t - 1] == segment:
            runs[-1].append(t)
        elif segment:
            runs.append([t])
    return runs


def reference(x, w, ids, initial_tail):
    """Output and tail: a document at a time, a token at a time, a tap at a time."""
    W = w.shape[-1]
    y, tails = np.zeros_like(x), np.zeros_like(initial_tail)
    for b, row in enumerate(ids):
        past = list(initial_tail[b])
        for n, tokens in enumerate(documents(row)):
            if n > 0:
                past = [np.zeros(x.shape[2:])] * (W - 1)
            for t in tokens:
                window = [*past, x[b, t]]
                y[b, t] = sum(w[..., j] * window[j] for j in range(W))
                past = window[1:]
        tails[b] = np.reshape(past, tails[b].shape)
    return y, tails


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("T", "W", "C"), [(9, 4, (2, 3)), (2, 4, (3,)), (3, 1, (2,))])
def test_value_tail_and_gradient_match_the_loop(T, W, C, packed):
    ids = IDS[:, :T] if packed else np.ones((4, T), np.int32)
    segment_ids = jnp.asarray(ids) if packed else None
    x, w, tail = draw(4, T, *C), draw(*C, W, seed=1), draw(4, W - 1, *C, seed=2)
    out, pullback = jax.vjp(
        lambda x, w, tail: conv(x, w, segment_ids, tail), x, w, tail
    )
    expected = reference(x, w, ids, tail)
    chex.assert_trees_all_close(out, expected, atol=1e-14)

    # The map is linear in (x, tail) and, for y, in w: the reference applied to a random
    # direction is the exact directional derivative.
    dy, dtail = draw(4, T, *C, seed=3), draw(4, W - 1, *C, seed=4)
    gx, gw, gtail = pullback((dy, dtail))
    for seed in (5, 6, 7):
        x1, w1 = draw(*x.shape, seed=seed), draw(*w.shape, seed=seed)
        tail1 = draw(*tail.shape, seed=seed + 1)
        y1, out1 = reference(x1, w, ids, tail1)
        slope = np.sum(gx * x1) + np.sum(gtail * tail1)
        np.testing.assert_allclose(
            slope, np.sum(y1 * dy) + np.sum(out1 * dtail), rtol=1e-12
        )
        y1, _ = reference(x, w1, ids, tail)
        np.testing.assert_allclose(np.sum(gw * w1), np.sum(y1 * dy), rtol=1e-12)


def test_no_tail_is_a_tail_of_zeros():
    x, w = draw(4, 9, 3), draw(3, 4, seed=1)
    for ids in (None, jnp.asarray(IDS)):
        chex.assert_trees_all_equal(
            conv(x, w, ids), conv(x, w, ids, np.zeros((4, 3, 3)))
        )


def test_packed_equals_separate():
    x, w = draw(1, 9, 3), draw(3, 4, seed=1)
    packed, tail = conv(x, w, jnp.asarray(IDS[:1]))
    alone = [conv(x[:, a:b], w) for a, b in ((0, 5), (5, 6), (6, 9))]
    y = np.concatenate([y for y, _ in alone], axis=1)
    chex.assert_trees_all_close((packed, tail), (y, alone[-1][1]), atol=1e-15)


@pytest.mark.parametrize("cut", [2, 7])
def test_two_parts_joined_by_a_tail_equal_the_whole(cut):
    x, w = draw(1, 9, 3), draw(3, 4, seed=1)
    # Each cut falls inside a document; tokens 0 and 8 are padding.
    ids = jnp.array([[0, 1, 1, 1, 1, 2, 2, 2, 0]], jnp.int32)
    whole, end = conv(x, w, ids)
    first, tail = conv(x[:, :cut], w, ids[:, :cut])
    second, tail = conv(x[:, cut:], w, ids[:, cut:], tail)
    chex.assert_trees_all_close(
        (np.concatenate([first, second], axis=1), tail), (whole, end), atol=1e-15
    )


def test_token_by_token_equals_the_whole():
    x, w = draw(2, 5, 3), draw(3, 4, seed=1)
    tail, steps = np.zeros((2, 3, 3)), []
    for t in range(5):
        y, tail = conv(x[:, t : t + 1], w, None, tail)
        steps.append(y)
    chex.assert_trees_all_close(
        (np.concatenate(steps, axis=1), tail), conv(x, w), atol=1e-15
    )


def test_causal_and_no_further_than_the_taps():
    x, w = draw(1, 9, 1), draw(1, 4, seed=1)
    jacobian = jax.jacobian(lambda x: conv(x, w)[0][0, :, 0])(x)[:, 0, :, 0]
    t, s = np.indices((9, 9))
    np.testing.assert_array_equal(jacobian != 0, (s <= t) & (s > t - 4))
    np.testing.assert_array_equal(np.diag(jacobian), np.full(9, w[0, -1]))


def test_padding_is_inert_even_as_nan():
    x, w, ids = draw(4, 9, 3), draw(3, 4, seed=1), jnp.asarray(IDS)
    real = IDS[:, :, None] > 0

    @jax.jit
    def run(x):
        def loss(x):
            y, tail = short_conv(x, w, ids, output_tail=True)
            return jnp.sum(jnp.sin(y)) + jnp.sum(tail**2), y

        return jax.value_and_grad(loss, has_aux=True)(x)

    (value, y), grad = run(np.where(real, x, np.nan))
    chex.assert_trees_all_equal(((value, y), grad), run(x))
    assert np.all(y[~real[..., 0]] == 0) and np.all(grad[~real[..., 0]] == 0)


def test_bfloat16_sums_in_float32():
    x, w = jnp.bfloat16(draw(1, 64, 8)), jnp.bfloat16(draw(8, 4, seed=1))
    y, tail = conv(x, w)
    assert y.dtype == tail.dtype == jnp.bfloat16
    exact, _ = conv(x.astype(jnp.float64), w.astype(jnp.float64))
    # One final rounding to 8 bits; the absolute part covers cancelled sums in float32.
    np.testing.assert_allclose(y.astype(jnp.float64), exact, rtol=2.0**-8, atol=1e-6)


def test_bad_shapes_are_named():
    x, w = jnp.ones((2, 5, 3)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"w has shape \(4, 3\)"):
        short_conv(x, w.T)
    with pytest.raises(ValueError, match=r"initial_tail has shape \(2, 4, 3\)"):
        short_conv(x, w, initial_tail=jnp.ones((2, 4, 3)))
    with pytest.raises(ValueError, match="segment_ids_BT has shape"):
        short_conv(x, w, jnp.ones((2, 4), jnp.int32))
