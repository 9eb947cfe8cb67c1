"""Balancing: quantiles against their definition, and what every method must keep."""

import functools
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops import balancing
from kimi_jax.ops.routing import route_threshold, route_top_k

N, E, A = 512, 8, 2
RNG = np.random.default_rng(0)
# Skewed: expert 0 is everybody's favourite and expert 7 nobody's.
LOGITS = RNG.normal(0, 1, (N, E)) + np.linspace(1.5, -1.5, E)
SCORES = (1 / (1 + np.exp(-LOGITS))).astype(np.float32)
BIAS = RNG.normal(0, 0.1, E).astype(np.float32)
BIAS -= BIAS.mean()
MASK = np.arange(N) % 4 == 1
METHODS = list(balancing.METHODS)
update = jax.jit(
    balancing.update,
    static_argnames=("method", "active", "ema", "step", "low", "high"),
)


@functools.partial(jax.jit, static_argnames=("method", "active", "bins"))
def observe(method, scores_NE, state_E, mask_N=None, *, active=A, bins=1000):
    if method == "quantile_threshold":
        cap = min(2 * active, scores_NE.shape[1])
        routing = route_threshold(scores_NE, state_E, cap=cap, scale=1.0, mask_N=mask_N)
    else:
        routing = route_top_k(
            scores_NE, state_E, active=active, scale=1.0, mask_N=mask_N
        )
    return balancing.observe(method, routing, scores_NE, state_E, bins=bins)


@jax.jit
def raw_quantile(observed, bias_E):
    return balancing._histogram_quantile(observed, *balancing._range(bias_E), A)


def needed_bias(scores, bias, active):
    """r = cutoff - score of Eq. 13-14, by sorting."""
    cutoff = -np.sort(-(scores + bias), axis=1)[:, active]
    return cutoff[:, None] - scores


def test_exact_form_is_the_definition():
    observed = observe("quantile_exact", SCORES, BIAS)
    new = update("quantile_exact", BIAS, observed, active=A)
    needed = needed_bias(SCORES, BIAS, A)
    q = N * A // E
    expected = np.sort(needed, axis=0)[q]  # minus the (q + 1)-th largest margin
    # At most q tokens would prefer a chosen expert strictly. Not always q: the expert
    # that comes (A + 1)-th needs exactly the bias that it has, so values repeat.
    assert np.all(np.sum(needed < expected, axis=0) <= q)
    assert np.all(np.sum(needed <= expected, axis=0) > q)
    np.testing.assert_allclose(new, expected - expected.mean(), atol=1e-6)
    assert abs(float(new.sum())) < 1e-5 and new.dtype == np.float32


@pytest.mark.parametrize("tokens, bins", [(N, 1000), (333, 50)])  # q = 128, q = 83.25
def test_histogram_is_within_a_bin_of_the_exact_form(tokens, bins):
    with jax.enable_x64(True):
        scores, bias = SCORES[:tokens].astype(float), BIAS.astype(float)
        observed = observe("quantile", scores, bias, bins=bins)
        width = (np.ptp(bias) + 2) / bins
        raw = raw_quantile(observed, bias)
        needed = np.sort(needed_bias(scores, bias, A), axis=0)
        q = Fraction(tokens * A, E)
        # A whole q leaves a gap between order statistics; every value in it is right.
        lower, upper = needed[int(np.ceil(q)) - 1], needed[int(np.floor(q))]
        assert np.all(raw >= lower - width) and np.all(raw <= upper + width)
        exact = observe("quantile_exact", scores, bias)
        difference = update("quantile", bias, observed, active=A) - update(
            "quantile_exact", bias, exact, active=A
        )
    assert np.max(np.abs(difference)) < width
    assert int(observed["histogram_EQ"].sum()) == tokens * E


def test_histogram_quantile_by_hand():
    quantile = jax.jit(balancing._histogram_quantile, static_argnums=(1, 2, 3))
    # q = 2: inside a bin; at its upper edge; and there too if the next bin is empty.
    for row, expected in [([0, 4, 0, 0], 1.5), ([1, 1, 2, 0], 2), ([2, 0, 2, 0], 1)]:
        observed = {"histogram_EQ": np.array([row] * 2), "tokens": np.int32(4)}
        np.testing.assert_allclose(quantile(observed, 0, 4, 1), expected, rtol=1e-6)
    # q = 2.5: the third token decides, half a token into its bin of three.
    observed = {"histogram_EQ": np.array([[2, 0, 3, 0]] * 2), "tokens": np.int32(5)}
    np.testing.assert_allclose(quantile(observed, 0, 4, 1), 2 + 0.5 / 3, rtol=1e-6)


def test_threshold_is_the_quantile_of_the_scores():
    observed = observe("quantile_threshold", SCORES, np.zeros(E, np.float32))
    new = update("quantile_threshold", np.zeros(E, np.float32), observed, active=A)
    np.testing.assert_allclose(new, np.quantile(SCORES, 1 - A / E, axis=0), atol=2e-3)


TOY = {"quantile": (0.45, 0.25), "quantile_exact": (0.45, 0.25)}
TOY |= {"quantile_threshold": (0.25, 0.25)}


@pytest.mark.parametrize("method", [*TOY, "sign", "load_quantile", "none"])
def test_one_update_evens_a_strongly_skewed_router(method):
    """64 experts, 8 active, 4096 fresh tokens a step; the batch noise is 0.1-0.15."""
    experts, active, tokens, width = 64, 8, 4096, 32
    rng = np.random.default_rng(1)
    router = rng.normal(size=(width, experts)) / width**0.5
    skew = 1.5 * rng.normal(size=experts)
    state, violations = np.zeros(experts, np.float32), []
    for _ in range(4):
        logits = rng.normal(size=(tokens, width)) @ router + skew
        scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
        observed = observe(method, scores, state, active=active)
        state = update(method, state, observed, active=active)
        violations.append(float(balancing.max_violation(observed["load_E"])))
    assert violations[0] > (2 if method == "quantile_threshold" else 6)
    if method in TOY:
        first, later = TOY[method]
        assert violations[1] < first and max(violations[2:]) < later
    else:
        assert min(violations) > 6  # steps of 0.001, or none


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_give_the_same_update_bit_for_bit(method):
    state = np.full(E, 0.4, np.float32) if method == "quantile_threshold" else BIAS
    whole = observe(method, SCORES, state, MASK)
    parts = [
        observe(method, SCORES[i : i + 128], state, MASK[i : i + 128])
        for i in range(0, N, 128)
    ]
    merged = {}
    for key in parts[0]:
        arrays = [part[key] for part in parts]
        concat = balancing.reduction(key) == "concat"
        merged[key] = jnp.concatenate(arrays, -2) if concat else sum(arrays)
    if method == "aux_loss":  # f * P is not linear; each part weighs by its tokens
        del merged["balance_loss"], whole["balance_loss"]
    chex.assert_trees_all_equal(merged, whole)
    chex.assert_trees_all_equal(
        update(method, state, merged, active=A), update(method, state, whole, active=A)
    )


@pytest.mark.parametrize("method", METHODS)
def test_padding_is_inert(method):
    state = np.full(E, 0.4, np.float32) if method == "quantile_threshold" else BIAS
    without = observe(method, SCORES[MASK], state, np.ones(MASK.sum(), bool))
    garbage = np.where(MASK[:, None], SCORES, 0.99).astype(np.float32)
    padded = observe(method, garbage, state, MASK)
    assert int(padded["tokens"]) == MASK.sum() and padded["tokens"].dtype == np.int32
    assert padded["load_E"].dtype == np.int32
    if method == "quantile_exact":
        np.testing.assert_array_equal(padded["margin_NE"][~MASK], -np.inf)
        padded["margin_NE"] = padded["margin_NE"][MASK]
    if method == "aux_loss":
        a, b = padded.pop("balance_loss"), without.pop("balance_loss")
        np.testing.assert_allclose(a, b, rtol=1e-6)
    chex.assert_trees_all_equal(padded, without)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_without_tokens_changes_nothing(method):
    observed = observe(method, SCORES, BIAS, np.zeros(N, bool))
    assert int(observed["tokens"]) == 0 and not observed["load_E"].any()
    new = update(method, BIAS, observed, active=A, ema=0.5)
    np.testing.assert_array_equal(new, BIAS)
    assert float(observed.get("balance_loss", 0)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_all_experts_active_changes_nothing(method):
    observed = observe(method, SCORES, BIAS, active=E)
    assert method == "quantile_threshold" or set(observed["load_E"].tolist()) == {N}
    new = update(method, BIAS, observed, active=E)
    np.testing.assert_array_equal(new, BIAS)


@pytest.mark.parametrize(
    "method", ["quantile", "quantile_exact", "sign", "load_quantile"]
)
def test_overloaded_experts_go_down(method):
    zero = np.zeros(E, np.float32)
    observed = observe(method, SCORES, zero)
    new = np.asarray(update(method, zero, observed, active=A, step=0.01))
    load = np.asarray(observed["load_E"])
    assert load[0] == load.max() and load[-1] == load.min()
    assert new[0] < 0 < new[-1] and new[0] == new.min() and new[-1] == new.max()
    if method == "sign":
        np.testing.assert_allclose(new, 0.01 * np.sign(load.mean() - load), rtol=1e-6)
    if method == "load_quantile":
        low, high = np.quantile(load, [0.25, 0.75])
        expected = 0.01 * ((load < low) - 1.0 * (load > high))
        np.testing.assert_allclose(new, expected, rtol=1e-6)
        assert np.sum(new < 0) == np.sum(new > 0) == 2
        wide = update(method, zero, observed, active=A, step=0.01, low=0.5, high=0.5)
        assert np.sum(wide < 0) == np.sum(wide > 0) == 4


@pytest.mark.parametrize("method", ["aux_loss", "none"])
def test_methods_without_a_bias_keep_it(method):
    zero = np.zeros(E, np.float32)
    new = update(method, zero, observe(method, SCORES, zero), active=A)
    np.testing.assert_array_equal(new, 0)


@pytest.mark.parametrize("method", METHODS)
def test_ties_stay_finite_and_equal(method):
    zero = np.zeros(E, np.float32)
    observed = observe(method, np.full((N, E), 0.5, np.float32), zero)
    new = np.asarray(update(method, zero, observed, active=A))
    assert np.all(np.isfinite(new))
    if method.startswith("quantile"):
        assert np.ptp(new) < 1e-6  # experts that nothing tells apart get one value


@pytest.mark.parametrize("method", ["quantile", "quantile_exact", "quantile_threshold"])
def test_ema_blends_with_the_old_state(method):
    state = np.full(E, 0.4, np.float32) if method == "quantile_threshold" else BIAS
    observed = observe(method, SCORES, state)
    new = update(method, state, observed, active=A)
    blend = update(method, state, observed, active=A, ema=0.75)
    np.testing.assert_allclose(blend, 0.75 * state + 0.25 * new, atol=1e-6)
    assert np.max(np.abs(blend - new)) > 0.05


def test_quantile_rank_is_exact_for_huge_batches():
    share = jax.jit(balancing._share, static_argnums=(1, 2))
    for tokens in (2**31 - 1, 2**30 + 7, 895, 1):
        q = Fraction(tokens * 16, 896)
        whole, part = share(np.int32(tokens), 16, 896)
        assert int(whole) == q.numerator // q.denominator
        np.testing.assert_allclose(float(part), float(q % 1), rtol=1e-6)


@pytest.mark.parametrize("size", [31, 32, 1000])
def test_both_ways_of_counting_agree(size):
    index_GM = RNG.integers(0, size + 1, (3, 400))  # `size` itself is not counted
    scatter = jax.jit(balancing._count_by_scatter, static_argnums=1)(index_GM, size)
    matmul = jax.jit(balancing._count_by_matmul, static_argnums=1)(index_GM, size)
    expected = [np.bincount(row, minlength=size + 1)[:size] for row in index_GM]
    np.testing.assert_array_equal(scatter, expected)
    np.testing.assert_array_equal(matmul, expected)
    assert scatter.dtype == matmul.dtype == np.int32


def test_sharding_over_tokens_changes_nothing():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tokens = NamedSharding(mesh, P("data"))
    args = jax.device_put((SCORES, BIAS, MASK), (tokens, None, tokens))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P()
    )
    def summed(*args):
        return jax.lax.psum(observe("quantile", *args), "data")

    expected = observe("quantile", SCORES, BIAS, MASK)
    assert len(mesh.devices) == 8
    chex.assert_trees_all_equal(observe("quantile", *args), expected)
    chex.assert_trees_all_equal(summed(SCORES, BIAS, MASK), expected)


@jax.jit
def balance_loss(scores_NE, mask_N=None):
    routing = route_top_k(scores_NE, np.zeros(E), active=A, scale=1.0, mask_N=mask_N)
    return balancing.balance_loss(scores_NE, routing)


def test_balance_loss_is_its_formula_and_pushes_the_favourite_down():
    with jax.enable_x64(True):
        scores = SCORES.astype(float)
        value, slope = map(
            np.asarray, jax.jit(jax.value_and_grad(balance_loss))(scores)
        )
    top = np.argsort(-SCORES, axis=1)[:, :A]
    f = np.bincount(top.reshape(-1), minlength=E) / (N * A)
    share = scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(value, E * np.sum(f * share.mean(0)), rtol=1e-12)
    # d/ds_e of E * sum f s / (N * sum s), by hand, with f constant.
    total = scores.sum(1, keepdims=True)
    by_hand = E / N * (f - (share @ f)[:, None]) / total
    np.testing.assert_allclose(slope, by_hand, rtol=1e-9, atol=1e-15)
    assert slope[:, 0].mean() > 0 > slope[:, -1].mean()


def test_balance_loss_does_not_depend_on_how_many_tokens_there_are():
    value = balance_loss(SCORES)
    padded = np.concatenate([SCORES, np.full((N, E), 0.9, np.float32)])
    padded = balance_loss(padded, np.arange(2 * N) < N)
    np.testing.assert_allclose(padded, value, rtol=1e-6)
    observed = observe("aux_loss", SCORES, np.zeros(E, np.float32))
    np.testing.assert_allclose(observed["balance_loss"], N * value, rtol=1e-6)


def test_balance_loss_runs_from_one_to_the_number_of_experts_over_active():
    # In float64: a float32 sum of N equal terms rounds the same way N times over, and
    # how far off that ends up depends on the order in which a compiler adds them.
    even = np.stack([np.roll([0.9] * A + [0.1] * (E - A), i) for i in range(N)])
    collapsed = np.tile([0.9] * A + [0.0] * (E - A), (N, 1))
    with jax.enable_x64(True):
        np.testing.assert_allclose(balance_loss(even), 1, rtol=1e-12)
        np.testing.assert_allclose(balance_loss(collapsed), E / A, rtol=1e-12)


@pytest.mark.parametrize(
    "method", ["quantile", "quantile_exact", "quantile_threshold", "aux_loss"]
)
def test_only_the_balance_loss_has_a_gradient(method):
    def total(scores_NE, state_E):
        observed = observe(method, scores_NE, state_E)
        floats = [x for x in observed.values() if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(x) for x in floats), jnp.zeros(()))

    d_scores, d_state = jax.jit(jax.grad(total, (0, 1)))(SCORES, BIAS)
    assert not d_state.any()
    assert bool(d_scores.any()) == (method == "aux_loss")


def test_float64_state_stays_float64():
    with jax.enable_x64(True):
        scores, bias = SCORES.astype(float), BIAS.astype(float)
        for method in ("quantile_exact", "quantile_threshold", "load_quantile"):
            observed = observe(method, scores, bias)
            assert update(method, bias, observed, active=A).dtype == np.float64
            assert observed["load_E"].dtype == observed["tokens"].dtype == np.int32


def test_load_metrics():
    loads = jnp.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0], [0, 0, 0, 0]])
    violation, entropy = (
        jax.jit(balancing.max_violation),
        jax.jit(balancing.load_entropy),
    )
    np.testing.assert_allclose(violation(loads), [0, 3, 1, 0])
    np.testing.assert_allclose(entropy(loads), [1, 0, 0.5, 1], atol=1e-6)
    assert entropy(jnp.array([5])) == 1


def test_bad_arguments_are_named():
    observed = observe("none", SCORES, BIAS)
    with pytest.raises(ValueError, match=r"'quantil'.*quantile_exact.*none"):
        balancing.update("quantil", BIAS, observed, active=A)
    for options, message in [
        ({"active": 0}, "active=0"),
        ({"active": E + 1}, "<= 8"),
        ({"active": A, "ema": 1.0}, "ema=1.0"),
        ({"active": A, "low": 0.8, "high": 0.2}, "low=0.8"),
    ]:
        with pytest.raises(ValueError, match=message):
            balancing.update("none", BIAS, observed, **options)
    routing = route_top_k(SCORES, BIAS, active=A, scale=1.0)
    with pytest.raises(ValueError, match="route_threshold"):
        balancing.observe("quantile_threshold", routing, SCORES, BIAS)
