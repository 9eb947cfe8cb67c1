"""Chunked cross-entropy against whole logits, in value, gradient and memory."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.cross_entropy import (
    chunked_cross_entropy,
    chunked_logprobs,
    chunked_predictions,
    cross_entropy_reference,
)

Z_LOSS = 0.01


def draw(B=2, T=13, D=6, W=11, dtype=np.float64):
    rng = np.random.default_rng(0)
    h = rng.normal(size=(B, T, D)).astype(dtype)
    w = rng.normal(size=(D, W)).astype(dtype)
    targets = rng.integers(0, W, size=(B, T)).astype(np.int32)
    weights = rng.uniform(0.5, 2, size=(B, T)).astype(dtype)
    weights[0, 2] = weights[-1, -1] = 0
    return h, w, targets, weights


@cache
def runner(op, **options):
    """(scaled loss, losses), gradients wrt h, w and weights; jitted."""

    @jax.jit
    def run(h, w, targets, weights):
        def f(h, w, weights):
            loss_sum, losses = op(h, w, targets, weights, **options)
            return 0.3 * loss_sum, losses

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(h, w, weights)

    return run


@pytest.mark.parametrize(
    ("chunk_size", "z_loss"), [(8, Z_LOSS), (8, 0.0), (10, 0.0), (1, Z_LOSS), (26, 0.0)]
)
def test_value_and_gradient_match_whole_logits(chunk_size, z_loss):
    with jax.enable_x64(True):
        args = draw()
        got = runner(chunked_cross_entropy, chunk_size=chunk_size, z_loss=z_loss)(*args)
        expected = runner(cross_entropy_reference, z_loss=z_loss)(*args)
        chex.assert_trees_all_close(got, expected, atol=1e-14, rtol=1e-12)
        # Without differentiation another path runs.
        op = partial(chunked_cross_entropy, chunk_size=chunk_size, z_loss=z_loss)
        loss_sum, losses = jax.jit(op)(*args)
        chex.assert_trees_all_close((0.3 * loss_sum, losses), got[0], rtol=1e-14)


def test_padding_targets_are_harmless():
    with jax.enable_x64(True):
        h, w, targets, weights = draw()
        run = runner(chunked_cross_entropy, chunk_size=4, z_loss=Z_LOSS)
        (clean, losses), grads = run(h, w, targets, weights)
        targets[0, 2], targets[-1, -1] = -100, 1_000_000
        (padded, padded_losses), padded_grads = run(h, w, targets, weights)
        chex.assert_trees_all_equal((clean, grads[:2]), (padded, padded_grads[:2]))
        assert padded_losses[0, 2] == padded_losses[-1, -1] == 0
        keep = weights > 0
        chex.assert_trees_all_equal(losses[keep], padded_losses[keep])


def test_a_target_outside_the_vocabulary_is_not_silent():
    h, w, targets, weights = draw(dtype=np.float32)
    targets[1, 5] = w.shape[1]
    (loss_sum, losses), _ = runner(chunked_cross_entropy, chunk_size=4)(
        h, w, targets, weights
    )
    assert np.isnan(loss_sum)
    assert np.isnan(losses[1, 5]) and np.isfinite(losses).sum() == losses.size - 1


def test_per_token_losses_carry_no_gradient():
    h, w, targets, weights = draw(dtype=np.float32)
    op = partial(chunked_cross_entropy, chunk_size=4)
    grads = jax.grad(lambda h, w: op(h, w, targets, weights)[1].sum(), (0, 1))(h, w)
    chex.assert_trees_all_equal(grads, (np.zeros_like(h), np.zeros_like(w)))


def test_large_logits_do_not_overflow():
    h, w, targets, weights = draw(dtype=np.float32)
    got = runner(chunked_cross_entropy, chunk_size=4)(1e4 * h, w, targets, weights)
    chex.assert_tree_all_finite(got)


def test_bfloat16_states_with_float32_embedding():
    h, w, targets, weights = draw(T=128, D=32, W=64)
    h, w = jnp.asarray(h, jnp.bfloat16), jnp.asarray(w, jnp.float32)
    run = runner(chunked_cross_entropy, chunk_size=64)
    (loss, losses), (dh, dw, _) = run(h, w, targets, weights.astype(np.float32))
    assert loss.dtype == losses.dtype == dw.dtype == jnp.float32
    assert dh.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        # The matmul sees w in bfloat16, so the exact value does too.
        wide = h.astype(jnp.float64), w.astype(jnp.bfloat16).astype(jnp.float64)
        exact = runner(cross_entropy_reference)(*wide, targets, weights)
    (exact_loss, _), (exact_dh, exact_dw, _) = jax.tree.map(np.asarray, exact)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    # Two roundings to 8 bits for dh (logit gradient, result), one for dw: it adds up in
    # float32 over the chunks.
    for grad, wanted, roundings in ((dh, exact_dh, 2), (dw, exact_dw, 1)):
        error = np.asarray(grad, np.float64) - wanted
        assert np.linalg.norm(error) < roundings * 2.0**-9 * np.linalg.norm(wanted)


@pytest.mark.parametrize("chunk_size", [1, 10, 26])
def test_predictions_are_the_likeliest_tokens(chunk_size):
    h, w, *_ = draw()
    got = jax.jit(partial(chunked_predictions, chunk_size=chunk_size))(h, w)
    np.testing.assert_array_equal(got, np.argmax(np.asarray(h @ w), axis=-1))
    assert got.dtype == jnp.int32


def logprobs_reference(h, w, targets):
    log_p = jax.nn.log_softmax(h @ w, axis=-1)
    picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


@cache
def logprob_runner(op, **options):
    """(logprobs, entropies), gradients of a random sum of them wrt h and w; jitted."""

    @jax.jit
    def run(h, w, targets, weights):
        def f(h, w):
            found = op(h, w, targets, **options)
            return jnp.sum(weights * found[0] - weights**2 * found[1]), found

        grads, found = jax.grad(f, (0, 1), has_aux=True)(h, w)
        return found, grads

    return run


@pytest.mark.parametrize("chunk_size", [8, 26])
def test_logprobs_and_entropies_match_whole_logits(chunk_size):
    with jax.enable_x64(True):
        args = draw()
        got = logprob_runner(chunked_logprobs, chunk_size=chunk_size)(*args)
        want = logprob_runner(logprobs_reference)(*args)
        chex.assert_trees_all_close(got, want, atol=1e-14, rtol=1e-12)
        args[2][1, 5] = args[1].shape[1]  # outside: not silent
        logprobs, _ = chunked_logprobs(*args[:3], chunk_size=chunk_size)
        assert np.isnan(logprobs[1, 5]) and np.isnan(logprobs).sum() == 1


def test_logprobs_of_a_split_vocabulary_stay_in_pieces():
    """Tokens over two axes and the vocabulary over a third; logits of one chunk."""
    axes = ("data", "context", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    tokens = P("data", "context")
    specs = P("data", "context", None), P(None, "tensor"), tokens, tokens
    args = draw(T=64, W=20, dtype=np.float32)
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    run = logprob_runner(chunked_logprobs, chunk_size=32).lower(*sharded).compile()
    text = run.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    # A chunk of a device: 8 of its 32 tokens by half of the vocabulary.
    assert "f32[1,8,10]" in text and "f32[1,32,10]" not in text
    want = logprob_runner(logprobs_reference)(*args)
    chex.assert_trees_all_close(run(*sharded), want, rtol=1e-5, atol=1e-5)


def test_gradients_of_logprobs_add_up_in_float32():
    h, w, targets, weights = draw(T=128, D=32, W=64)
    h, w = jnp.asarray(h, jnp.bfloat16), jnp.asarray(w, jnp.float32)
    run = logprob_runner(chunked_logprobs, chunk_size=8)
    found, (dh, dw) = run(h, w, targets, weights.astype(np.float32))
    assert {x.dtype for x in (*found, dw)} == {jnp.dtype("float32")}
    assert dh.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        wide = h.astype(jnp.float64), w.astype(jnp.bfloat16).astype(jnp.float64)
        _, grads = logprob_runner(logprobs_reference)(*wide, targets, weights)
    for grad, wanted, roundings in zip((dh, dw), grads, (2, 1), strict=True):
        error = np.asarray(grad, np.float64) - wanted
        assert np.linalg.norm(error) < roundings * 2.0**-9 * np.linalg.norm(wanted)


def test_memory_is_that_of_one_chunk():
    B, T, D, W, chunk_size = 4, 2048, 8, 4096, 256
    shapes = [((B, T, D), np.float32), ((D, W), np.float32), ((B, T), np.int32)]
    args = [jax.ShapeDtypeStruct(*s) for s in [*shapes, ((B, T), np.float32)]]

    def temp(run):
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    whole = 4 * B * T * W
    assert temp(runner(cross_entropy_reference)) >= whole
    assert temp(runner(chunked_cross_entropy, chunk_size=chunk_size)) < whole / 8
    assert temp(logprob_runner(chunked_logprobs, chunk_size=chunk_size)) < whole / 8


def test_sharded_tokens_are_never_gathered():
    """Neither rows over one mesh axis, nor time over another."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    args = draw(T=64, dtype=np.float32)
    tokens = P("data", "context")
    specs = P("data", "context", None), P(), tokens, tokens
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    run = runner(chunked_cross_entropy, chunk_size=32).lower(*sharded).compile()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in run.as_text()
    want = runner(cross_entropy_reference)(*args)
    chex.assert_trees_all_close(run(*sharded), want, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    h, w, targets, weights = draw(dtype=np.float32)
    loss = partial(chunked_cross_entropy, chunk_size=4)
    with pytest.raises(ValueError, match=r"targets \(1, 13\)"):
        loss(h, w, targets[:-1], weights)
    with pytest.raises(ValueError, match=r"w \(11, 6\)"):
        loss(h, w.T, targets, weights)
    with pytest.raises(ValueError, match="targets have dtype float32"):
        loss(h, w, weights, weights)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        chunked_cross_entropy(h, w, targets, weights, chunk_size=0)
