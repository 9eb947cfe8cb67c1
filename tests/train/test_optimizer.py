"""Muon works on each head and expert alone; the table covers every parameter."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import scale_by_muon

from kimi_jax import canonical
from kimi_jax.train import optimizer
from tests import tiny


def random_like(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure, [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    )


@pytest.fixture(scope="module")
def setup():
    cfg = tiny.make("optimizer.weight_decay=0", "optimizer.warmup_fraction=0")
    params = tiny.variables(cfg.model)["params"]
    return cfg, params, random_like(params, 1)


def first_update(cfg, params, grads):
    tx = optimizer.make(cfg.optimizer, 100, params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    return canonical.flatten(cfg.model, updates)


def orthogonalised(grad, cfg):
    """Muon of one matrix [m, n], with the RMS and the rate of the first step."""
    tx = scale_by_muon(beta=cfg.optimizer.muon_momentum)
    update, _ = tx.update(grad, tx.init(grad))
    return -update * 0.2 * max(grad.shape) ** 0.5 * cfg.optimizer.learning_rate


def test_heads_and_experts_are_orthogonalised_alone(setup):
    cfg, params, grads = setup
    updates = first_update(cfg, params, grads)
    scale = 1.0 / max(1.0, float(optax.global_norm(grads)))
    flat = {k: g * scale for k, g in canonical.flatten(cfg.model, grads).items()}
    for name in ("kda/q", "kda/v", "mla/q_b", "mla/kv_b"):
        layer = 2 if "mla" in name else 4
        key = f"layer_{layer:03d}/attention/{name}"
        loop = [orthogonalised(flat[key][:, h], cfg) for h in range(2)]
        chex.assert_trees_all_close(updates[key], jnp.stack(loop, axis=1), atol=1e-6)
    key = "layer_003/ffn/moe/experts_down"
    loop = [orthogonalised(flat[key][e], cfg) for e in range(4)]
    chex.assert_trees_all_close(updates[key], jnp.stack(loop), atol=1e-6)
    key = "layer_001/attention/kda/o"
    whole = orthogonalised(flat[key].reshape(-1, 16), cfg)
    chex.assert_trees_all_close(updates[key].reshape(-1, 16), whole, atol=1e-6)


def test_whole_matrices_on_request(setup):
    cfg, params, grads = setup
    whole = tiny.make(
        "optimizer.weight_decay=0",
        "optimizer.warmup_fraction=0",
        "optimizer.muon_per_head=false",
    )
    key = "layer_001/attention/kda/q"
    got = first_update(whole, params, grads)[key].reshape(16, -1)
    scale = 1.0 / float(optax.global_norm(grads))
    grad = canonical.flatten(cfg.model, grads)[key].reshape(16, -1) * scale
    chex.assert_trees_all_close(got, orthogonalised(grad, cfg), atol=1e-6)


def test_adamw_equals_optax(setup):
    _, params, grads = setup
    cfg = tiny.make("optimizer.kind=adamw", "optimizer.warmup_fraction=0")
    o = cfg.optimizer
    rules = optimizer.rules(params, o)
    is_rule = lambda x: isinstance(x, optimizer.Rule)  # noqa: E731
    peer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(
            optimizer.schedule(o, 100),
            o.adam_b1,
            o.adam_b2,
            o.adam_eps,
            weight_decay=o.weight_decay,
            mask=jax.tree.map(lambda r: r.decay, rules, is_leaf=is_rule),
        ),
    )
    ours = optimizer.make(o, 100, params)
    states = ours.init(params), peer.init(params)
    for seed in (1, 2):
        grads = random_like(params, seed)
        got, first = ours.update(grads, states[0], params)
        want, second = peer.update(grads, states[1], params)
        states = first, second
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-9)


def test_muon_and_adam_updates_have_one_size(setup):
    """Orthogonal updates of any shape have the RMS that AdamW's usually have."""
    cfg, params, grads = setup
    updates = first_update(cfg, params, grads)
    rate = cfg.optimizer.learning_rate
    for key in ("layer_000/ffn/mlp/up", "layer_001/attention/kda/f_b"):
        rms = float(jnp.sqrt(jnp.mean(updates[key] ** 2))) / rate
        assert 0.1 < rms < 0.3, (key, rms)


def test_weight_decay_spares_vectors_and_gates():
    cfg = tiny.make("optimizer.warmup_fraction=0", "optimizer.weight_decay=0.5")
    params = tiny.variables(cfg.model)["params"]
    params = jax.tree.map(jnp.ones_like, params)
    updates = first_update(cfg, params, jax.tree.map(jnp.zeros_like, params))
    decayed = {name.rsplit("/", 1)[-1] for name, u in updates.items() if u.any()}
    spared = {name.rsplit("/", 1)[-1] for name, u in updates.items() if not u.any()}
    assert not decayed & spared
    assert {"norm", "A_log", "dt_bias", "q_conv", "query", "gain", "o_norm"} <= spared
    assert {"q", "o", "embed", "unembed", "experts_up", "router", "q_b"} <= decayed


def test_unknown_parameter_is_refused(setup):
    cfg, params, _ = setup
    with pytest.raises(ValueError, match="add 'mystery' to RULES"):
        optimizer.rules({**params, "mystery": jnp.zeros(3)}, cfg.optimizer)


def test_schedule_warms_up_then_decays():
    cfg = tiny.make("optimizer.warmup_fraction=0.1", "optimizer.final_fraction=0.2")
    rate = optimizer.schedule(cfg.optimizer, 100)
    peak = cfg.optimizer.learning_rate
    np.testing.assert_allclose(rate(0), peak / 10, rtol=1e-6)
    np.testing.assert_allclose(rate(9), peak, rtol=1e-6)
    np.testing.assert_allclose(rate(55), peak * 0.6, rtol=1e-6)
    np.testing.assert_allclose(rate(100), peak * 0.2, rtol=1e-6)
