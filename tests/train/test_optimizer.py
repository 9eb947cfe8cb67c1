"""Every update against plain numpy loops over heads and experts, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax import canonical
from kimi_jax.train import optimizer
from tests import tiny

# One layer of each attention; the last two have experts.
MODEL = (
    "model.num_layers=3",
    "model.attention=kda,mla,gqa",
    "model.kda.output_gate=low_rank",
)
PLAIN = ("optimizer.clip_norm=1e9", "optimizer.warmup_fraction=0")
# What Muon treats, written down again: how an array splits into matrices.
PER_HEAD = {"q", "k", "v", "q_b", "kv_b"}
PER_EXPERT = {"experts_gate", "experts_up", "experts_down"}
INTO_HEADS = {"f_b", "g", "g_b"}
WHOLE = {"q_a", "kv_a", "f_a", "g_a", "beta", "gate", "up", "down", "router"}
WHOLE |= {"latent_down", "latent_up"}
DECAYED_BY_ADAM = {"embed", "unembed"}


def random_like(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure, [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    )


def matrices(name, array):
    """Views of the matrices that are orthogonalised one by one."""
    if name in PER_HEAD:
        return [array[:, h] for h in range(array.shape[1])]
    if name in PER_EXPERT:
        return list(array)
    if name in INTO_HEADS:
        return [array.reshape(array.shape[0], -1)]
    if name == "o":
        return [array.reshape(-1, array.shape[-1])]
    return [array] if name in WHOLE else []


def newton_schulz(g):
    x = (g.T if g.shape[0] > g.shape[1] else g) / (np.linalg.norm(g) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon_step(o, step, momentum, grad):
    """One matrix: Nesterov momentum without bias, orthogonalised, scaled; in place."""
    beta = o.muon_momentum
    momentum[:] = beta * momentum + (1 - beta) * grad
    ahead = beta * momentum / (1 - beta ** (step + 2))
    ahead += (1 - beta) * grad / (1 - beta ** (step + 1))
    return newton_schulz(ahead) * o.muon_update_rms * max(grad.shape) ** 0.5


def adam_step(o, step, moments, grad):
    first, second = moments
    first[...] = o.adam_b1 * first + (1 - o.adam_b1) * grad
    second[...] = o.adam_b2 * second + (1 - o.adam_b2) * grad**2
    first, second = first / (1 - o.adam_b1**step), second / (1 - o.adam_b2**step)
    return first / (np.sqrt(second) + o.adam_eps)


def numpy_updates(o, params, grads_by_step):
    """{name: update} of each step, by loops."""
    moments = {k: (np.zeros(p.shape), np.zeros(p.shape)) for k, p in params.items()}
    results = []
    for step, grads in enumerate(grads_by_step):
        rate, result = float(optimizer.schedule(o, 100)(step)), {}
        for key, grad in grads.items():
            name, update = key.rsplit("/", 1)[-1], np.zeros(grad.shape)
            parts = [matrices(name, x) for x in (moments[key][0], grad, update)]
            for momentum, g, out in zip(*parts, strict=True):
                out[:] = muon_step(o, step, momentum, g)
            if not parts[0]:
                update = adam_step(o, step + 1, moments[key], grad)
            if parts[0] or name in DECAYED_BY_ADAM:
                update = update + o.weight_decay * params[key]
            result[key] = -rate * update
        results.append(result)
    return results


def test_every_parameter_matches_loops_over_heads_and_experts():
    """Two steps, so that the momentum of each head counts too."""
    with jax.enable_x64(True):
        cfg = tiny.make("optimizer.muon_update_rms=0.3", *MODEL, *PLAIN)
        shapes = jax.tree.map(np.float64, tiny.variables(cfg.model)["params"])
        params = random_like(shapes, 0)
        flat = functools.partial(canonical.flatten, cfg.model)
        grads = [random_like(params, seed) for seed in (1, 2)]
        host = [flat(jax.tree.map(np.array, tree)) for tree in (params, *grads)]
        want = numpy_updates(cfg.optimizer, host[0], host[1:])
        tx = optimizer.make(cfg.optimizer, 100, params)
        state, update = tx.init(params), jax.jit(tx.update)
        for step, grad in enumerate(grads):
            got, state = update(grad, state, params)
            got = flat(jax.tree.map(np.array, got))
            assert got.keys() == want[step].keys()
            for key, value in want[step].items():
                # Newton-Schulz multiplies rounding by 3.4 a step at most, five times.
                np.testing.assert_allclose(got[key], value, atol=1e-11, err_msg=key)
    seen = {key.rsplit("/", 1)[-1] for key in host[0]}
    assert seen >= (PER_HEAD | PER_EXPERT | {"f_b", "g", "g_b", "o"} | WHOLE)


def small_tree():
    """A head matrix and a vector: enough for what depends on no model."""
    rng = np.random.default_rng(0)
    return {"q": jnp.asarray(rng.normal(size=(6, 2, 3))), "norm": jnp.ones(4)}


def test_whole_matrices_on_request():
    with jax.enable_x64(True):
        o = tiny.make("optimizer.muon_per_head=false", *PLAIN).optimizer
        params = small_tree()
        grads = random_like(params, 1)
        tx = optimizer.make(o, 100, params)
        updates, _ = tx.update(grads, tx.init(params), params)
        grad = np.array(grads["q"]).reshape(6, 6)
        whole = muon_step(o, 0, np.zeros((6, 6)), grad).reshape(6, 2, 3)
        want = -o.learning_rate * (whole + o.weight_decay * params["q"])
        np.testing.assert_allclose(updates["q"], want, atol=1e-12)


def test_muon_updates_have_the_rms_that_is_asked_for():
    """Whatever the shape; Newton-Schulz leaves singular values within 0.7 and 1.2."""
    cfg = tiny.make("optimizer.muon_update_rms=0.5", "optimizer.weight_decay=0", *PLAIN)
    shapes = {"up": (4, 64), "down": (64, 4), "q": (16, 2, 8), "experts_up": (2, 8, 8)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    tx = optimizer.make(cfg.optimizer, 100, params)
    updates, _ = jax.jit(tx.update)(random_like(params, 0), tx.init(params), params)
    for update in updates.values():
        rms = np.sqrt(np.mean(np.square(update))) / cfg.optimizer.learning_rate
        assert 0.7 * 0.5 < rms < 1.2 * 0.5


def test_adamw_equals_optax():
    cfg = tiny.make("optimizer.kind=adamw", "optimizer.warmup_fraction=0")
    o, params = cfg.optimizer, small_tree()
    peer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(
            optimizer.schedule(o, 100),
            o.adam_b1,
            o.adam_b2,
            o.adam_eps,
            weight_decay=o.weight_decay,
            mask={"q": True, "norm": False},
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


def moments(state):
    """{field: dtypes} of the moments in an optimizer state."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = canonical.path_name(path).split("/")
        for name in {"mu", "nu"} & set(keys):
            found.setdefault(f"{keys[-1]} {name}", set()).add(str(leaf.dtype))
    return found


def test_momentum_in_bfloat16_stays_close():
    """20 steps of least squares; only the first moments are stored in fewer bits."""
    start = jax.tree.map(lambda x: x.astype(jnp.float32), small_tree())
    target = random_like(start, 3)
    ends, dtypes = {}, {}
    for dtype in ("float32", "bfloat16"):
        override = f"optimizer.momentum_dtype={dtype}"
        o = tiny.make(override, "optimizer.learning_rate=0.1", *PLAIN).optimizer
        tx = optimizer.make(o, 20, start)

        @jax.jit
        def step(params, state, tx=tx):
            grads = jax.tree.map(jnp.subtract, params, target)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for _ in range(20):
            params, state = step(params, state)
        ends[dtype], dtypes[dtype] = params, moments(state)
    rest = {"norm nu": {"float32"}}
    for dtype, found in dtypes.items():
        assert found == {"q mu": {dtype}, "norm mu": {dtype}} | rest
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, ends["float32"], start))
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, *ends.values()))
    # A moment is rounded by up to 2^-9 in each of 20 steps, without a common sign:
    # about 2^-9 * sqrt(20) in all.
    assert 0 < apart < 2.0**-7 * moved


def test_weight_decay_spares_vectors_and_gates():
    cfg = tiny.make(*MODEL, "optimizer.kind=adamw")
    params = canonical.flatten(cfg.model, tiny.variables(cfg.model)["params"])
    rules = optimizer.rules(params, cfg.optimizer)
    decayed = {key.rsplit("/", 1)[-1] for key, rule in rules.items() if rule.decay}
    spared = {key.rsplit("/", 1)[-1] for key, rule in rules.items() if not rule.decay}
    assert decayed == (
        DECAYED_BY_ADAM | PER_HEAD | PER_EXPERT | {"f_b", "g", "g_b", "o"} | WHOLE
    )
    assert spared == (
        {"norm", "o_norm", "latent_norm", "q_a_norm", "kv_a_norm", "gain", "query"}
        | {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv"}
    )


def test_the_table_names_matrices_and_decay():
    cfg = tiny.make(*MODEL)
    params = canonical.flatten(cfg.model, tiny.variables(cfg.model)["params"])
    rows = {row[0]: row[1:] for row in optimizer.rule_rows(params, cfg.optimizer)}
    assert rows["layer_*/attention/mla/q_b"] == ("muon", "2 x [8, 12]", "0.1")
    assert rows["layer_*/attention/kda/o"] == ("muon", "1 x [16, 16]", "0.1")
    assert rows["layer_*/ffn/moe/experts_up"] == ("muon", "4 x [8, 8]", "0.1")
    assert rows["embedding/embed"] == ("adamw", "-", "0.1")
    assert rows["layer_*/attention/kda/A_log"] == ("adamw", "-", "none")
    adamw = tiny.make(*MODEL, "optimizer.kind=adamw").optimizer
    assert {row[1] for row in optimizer.rule_rows(params, adamw)[1:]} == {"adamw"}


def test_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="add 'mystery' to RULES"):
        optimizer.rules({"mystery": jnp.zeros(3)}, tiny.make().optimizer)


def rates(steps, at, *overrides):
    """Learning rates before the steps `at`, in units of the peak."""
    common = "optimizer.warmup_fraction=0.1", "optimizer.final_fraction=0.2"
    o = tiny.make(*common, *overrides).optimizer
    rate = optimizer.schedule(o, steps)
    return [float(rate(step)) / o.learning_rate for step in at]


def test_cosine_warms_up_then_decays():
    got = rates(100, (0, 9, 10, 55, 100), "optimizer.schedule=cosine")
    np.testing.assert_allclose(got, [0.1, 1, 1, 0.6, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "quarter"), [("linear", 0.8), ("one_minus_sqrt", 0.6)]
)
def test_wsd_warms_up_holds_then_decays(shape, quarter):
    wsd = "optimizer.schedule=wsd", f"optimizer.decay_shape={shape}"
    at = (0, 4, 9, 10, 50, 80, 85, 100, 120)
    got = rates(100, at, *wsd, "optimizer.decay_fraction=0.2")
    want = [0.1, 0.5, 1, 1, 1, 1, quarter, 0.2, 0.2]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_wsd_may_decay_from_the_warm_up_and_runs_may_be_short():
    wsd = "optimizer.schedule=wsd", "optimizer.decay_shape=linear"
    got = rates(100, (9, 10, 55, 100), *wsd, "optimizer.decay_fraction=0.9")
    np.testing.assert_allclose(got, [1, 1, 0.6, 0.2], rtol=1e-6)
    np.testing.assert_allclose(rates(1, (0,), *wsd), [1], rtol=1e-6)
