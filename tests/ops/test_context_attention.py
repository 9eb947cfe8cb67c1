"""Attention over a split time axis against the plain one on one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.hlo import collective_bytes
from kimi_jax.ops.attention import attention_reference, attention_with_max_logits
from kimi_jax.ops.context_attention import (
    choose_attention,
    context_attention,
    context_attention_with_max_logits,
)
from tests.ops.context_cases import (
    AXIS,
    SAME,
    SPLIT,
    assert_close,
    over,
    with_gradients,
)
from tests.ops.test_attention import arrays

B, T, H, G, K, V, WIDTH, SCALE = 2, 56, 4, 2, 6, 5, 7, 0.3
SPECS = {"q": SPLIT, "latents": SPLIT, "kv": SAME}


def documents():
    """Row 0: borders at, before and after those of 8 ranks of 7 tokens, an id that
    returns, padding; row 1: ranks of padding alone first, and one long document."""
    ids = np.zeros((B, T), np.int32)
    ids[0, :6], ids[0, 6:14], ids[0, 14:22], ids[0, 22:23], ids[0, 23:50] = (
        1,
        2,
        3,
        1,
        2,
    )
    ids[1, 16:55] = 4
    return ids


def inputs(dtype=np.float64):
    draw = np.random.default_rng(0).normal
    shapes = {"q": (B, T, H, K), "latents": (B, T, WIDTH), "kv": (WIDTH, G, K + V)}
    return {name: draw(size=shape).astype(dtype) for name, shape in shapes.items()}


def expand(kv_RGX, latents_BTR):
    kv_BTGX = jnp.einsum("btr,rgx->btgx", latents_BTR, kv_RGX)
    return kv_BTGX[..., :K], kv_BTGX[..., K:]


def local(x, ids, **options):
    return context_attention(
        x["q"], x["latents"], expand, x["kv"], axis=AXIS, scale=SCALE,
        segment_ids_BT=ids, **options
    )  # fmt: skip


@cache
def runner(ranks, packed=True, check_vma=True, **options):
    specs = SPECS, SPLIT if packed else None
    split = over(ranks, partial(local, **options), specs, SPLIT, check_vma=check_vma)
    return with_gradients(split)


@cache
def reference():
    def single(x, ids):
        k, v = expand(x["kv"], x["latents"])
        return attention_reference(x["q"], k, v, scale=SCALE, segment_ids_BT=ids)

    return with_gradients(single)


@pytest.mark.parametrize(
    ("ranks", "form", "block_size", "packed"),
    [
        (8, "gather", 3, True),
        (4, "gather", 64, False),
        (2, "ring", 16, True),
        (8, "ring", 3, True),
    ],
)
def test_equals_one_device(ranks, form, block_size, packed):
    """Pieces of 28, 14 and 7 tokens; blocks that divide them and blocks that do not."""
    ids = documents() if packed else None
    with jax.enable_x64(True):
        got = runner(ranks, packed, form=form, block_size=block_size)(inputs(), ids)
        assert_close(got, reference()(inputs(), ids), 1e-12)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_float32_without_varying_types(form):
    x = inputs(np.float32)
    run = runner(4, check_vma=False, form=form)
    assert_close(run(x, documents()), reference()(x, documents()), 1e-5)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_padding_is_inert(form):
    run = runner(4, check_vma=False, form=form)
    x, padding = inputs(np.float32), (documents() == 0)[..., None]
    dirty = x | {
        "q": np.where(padding[..., None], np.float32(1e4), x["q"]),
        "latents": np.where(padding, np.float32(1e4), x["latents"]),
    }
    clean = run(x, documents())
    jax.tree.map(np.testing.assert_array_equal, run(dirty, documents()), clean)
    o, grads = jax.device_get(clean)
    for array in (o, grads["q"], grads["latents"]):
        assert np.all(array[documents() == 0] == 0)


def test_max_logits_are_those_of_one_device():
    x, ids = inputs(np.float32), documents()
    k, v = expand(x["kv"], x["latents"])
    options = {"scale": SCALE, "segment_ids_BT": ids}
    _, expected = attention_with_max_logits(x["q"], k, v, **options)

    def watched(x, ids):
        return context_attention_with_max_logits(
            x["q"], x["latents"], expand, x["kv"], axis=AXIS, form="gather",
            scale=SCALE, segment_ids_BT=ids,
        )  # fmt: skip

    run = jax.jit(over(8, watched, (SPECS, SPLIT), (SPLIT, SAME)))
    _, max_H = run(x, ids)
    np.testing.assert_allclose(max_H, expected, rtol=1e-5)
    assert np.all(run(x, np.zeros_like(ids))[1] == -np.inf)

    def loss(x):
        return jnp.sum(over(8, watched, (SPECS, SPLIT), (SPLIT, SAME))(x, ids)[1])

    gradients = jax.jit(jax.grad(loss))(x)
    assert not any(np.any(g) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_only_latents_travel_and_nothing_is_quadratic(form):
    ranks, piece = 4, 64
    x = {
        "q": jax.ShapeDtypeStruct((1, ranks * piece, H, K), jnp.float32),
        "latents": jax.ShapeDtypeStruct((1, ranks * piece, WIDTH), jnp.float32),
        "kv": jax.ShapeDtypeStruct((WIDTH, G, K + V), jnp.float32),
    }
    split = over(ranks, partial(local, form=form, block_size=16), (SPECS, None), SPLIT)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(split(x, None)))))
    largest = max(a.size for a in arrays(jax.make_jaxpr(gradient)(x).jaxpr))
    assert largest < 2 * ranks * piece * H * max(K, V, 16)

    sent = collective_bytes(gradient.lower(x).compile().as_text())
    assert all(one.exact for one in sent.values())
    narrow = 4 * piece * WIDTH
    if form == "gather":
        assert sent["all-gather"].runs == 2  # again in the backward pass
        assert sent["all-gather"].sent_bytes == 2 * (ranks - 1) * narrow
        assert sent["reduce-scatter"].sent_bytes == (ranks - 1) * narrow
    else:
        assert sent["collective-permute"].runs == 2 * (ranks - 1) + ranks
        assert sent["collective-permute"].bytes == (3 * ranks - 2) * narrow
    # The gradient of what all ranks share.
    assert sent["all-reduce"].bytes == 4 * WIDTH * G * (K + V)


def test_pieces_that_no_row_looks_at_are_never_read():
    # A NaN in a piece that was read survives its zero weight.
    x = inputs(np.float32)
    ids = np.repeat(np.int32([[1, 1, 1, 1, 2, 2, 2, 2]] * B), 7, axis=1)
    x["latents"][:, :28] = np.nan
    for form in ("gather", "ring"):
        o, grads = runner(4, check_vma=False, form=form)(x, ids)
        assert np.all(np.isfinite(o[:, 28:]))
        assert np.all(np.isfinite(grads["q"][:, 28:]))


def test_form_follows_the_gathered_bytes():
    form, reason = choose_attention(65536, 576)
    assert form == "gather" and "216 MiB" in reason
    form, reason = choose_attention(2**20, 576)
    assert form == "ring" and "3456 MiB" in reason and "1024 MiB" in reason
    assert choose_attention(2**20, 576, limit_bytes=2**32)[0] == "gather"
    assert choose_attention(65536, 576, batch=8)[0] == "ring"


def test_bad_arguments_are_named():
    def shapes(**options):
        run = over(4, partial(local, **options), (SPECS, SPLIT), SPLIT)
        return jax.eval_shape(run, inputs(np.float32), documents())

    with pytest.raises(ValueError, match="form='rings' does not exist"):
        shapes(form="rings")
    with pytest.raises(ValueError, match="block_size is 0"):
        shapes(form="ring", block_size=0)
