"""Clipped heads keep to the threshold; all others keep their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.modules.sublayer import ATTENTION
from kimi_jax.train import qk_clip
from tests import tiny

SEGMENTS = np.array([[1] * 9 + [2] * 15 + [0] * 4, [3] * 28], np.int32)
LAYERS = {
    "mla": "model.mla.q_rank=8",
    "mla_direct": "model.mla.q_rank=none",
    "mla_rope": "model.mla.positions=rope",
    "gqa": "model.attention=gqa",
}


def layer(name):
    """Kind, model, parameters and an input of one attention layer."""
    kind, model = name.split("_")[0], tiny.make(LAYERS[name]).model
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 28, model.width)), jnp.float32)
    module = ATTENTION[kind](model)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, SEGMENTS))
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    params = jax.tree.map(draw, shapes["params"])
    return kind, model, params, x


def forward(kind, model, x):
    """params -> what the layer sows when asked for its logits."""
    module = ATTENTION[kind](model)
    collections = ["stats", "max_logits"]
    return jax.jit(
        lambda params: module.apply(
            {"params": params}, x, SEGMENTS, mutable=collections
        )[1]["stats"]["max_logit_H"]
    )


@pytest.mark.parametrize("name", LAYERS)
def test_the_largest_logit_falls_to_the_threshold(name):
    kind, model, params, x = layer(name)
    max_logit = forward(kind, model, x)
    before = np.array(max_logit(params))
    tau = float(np.median(before))  # some heads above, some not
    above = before > tau
    assert above.any() and not above.all()
    tree = {"layer": {kind: params}}
    tree = qk_clip.clip(model, tree, {f"layer/{kind}/max_logit_H": before}, tau)
    clipped = tree["layer"][kind]
    after = np.array(max_logit(clipped))
    np.testing.assert_allclose(after[above], tau, rtol=2e-6)
    np.testing.assert_array_equal(after[~above], before[~above])
    for key, old in params.items():
        heads = above if key in ("q", "q_b", "kv_b") and kind == "mla" else False
        heads = above if key == "q" and kind == "gqa" else heads
        same = np.array(clipped[key] == old)
        if heads is False:
            assert same.all(), key
        else:
            assert same[:, ~heads].all() and not same[:, heads].all(), key


@pytest.mark.parametrize("matrix", ["q", "q_b"])
def test_factors_by_loops(matrix):
    """Stacked layers, head by head: nope 8, pe 4, value 8 channels."""
    rank = "none" if matrix == "q" else "8"
    model = tiny.make(f"model.mla.q_rank={rank}").model
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 3, 8, 2, 12)).astype(np.float32)
    kv_b = rng.normal(size=(2, 3, 8, 2, 16)).astype(np.float32)
    other = np.ones((2, 3, 5), np.float32)
    logits = rng.uniform(50, 200, size=(2, 3, 2)).astype(np.float32)
    logits[0, 0] = -np.inf, 100.0
    params = {"a": {"mla": {matrix: q, "kv_b": kv_b}}, "b": {"mla": {matrix: q}}}
    params["a"]["ffn"] = other
    got = qk_clip.clip(model, params, {"a/mla/max_logit_H": logits}, 100.0)
    want_q, want_kv = q.astype(float), kv_b.astype(float)
    for i, j, h in np.ndindex(2, 3, 2):
        if logits[i, j, h] > 100:
            gamma = 100 / float(logits[i, j, h])
            want_q[i, j, :, h, :8] *= gamma**0.5
            want_q[i, j, :, h, 8:] *= gamma
            want_kv[i, j, :, h, :8] *= gamma**0.5
    np.testing.assert_allclose(got["a"]["mla"][matrix], want_q, rtol=1e-6)
    np.testing.assert_allclose(got["a"]["mla"]["kv_b"], want_kv, rtol=1e-6)
    assert got["b"]["mla"][matrix] is q and got["a"]["ffn"] is other


def test_summary_counts_the_heads():
    logits = {
        "a/mla/max_logit_H": jnp.array([[1.0, 300.0], [100.0, -jnp.inf]]),
        "b/gqa/max_logit_H": jnp.array([150.0]),
    }
    got = qk_clip.summary(logits, 100.0)
    assert float(got["qk_clip/max_logit"]) == 300.0
    assert float(got["qk_clip/heads"]) == 2.0


def test_nobody_asks_nothing_is_reported():
    kind, model, params, x = layer("mla")
    _, sown = ATTENTION[kind](model).apply(
        {"params": params}, x, SEGMENTS, mutable=["stats"]
    )
    assert not sown
