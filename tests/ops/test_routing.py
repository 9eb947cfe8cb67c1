"""The choice of experts: biased choice, unbiased weights, padding, thresholds."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.routing import (
    agreement,
    dropped,
    replay,
    route_threshold,
    route_top_k,
    router_scores,
)

N, E = 40, 7
RNG = np.random.default_rng(0)
SCORES = RNG.uniform(0.05, 0.95, (N, E))
BIAS = RNG.normal(0, 0.3, E)
MASK = RNG.random(N) < 0.7

top_k = jax.jit(route_top_k, static_argnames=("active", "scale", "renormalize"))
threshold = jax.jit(route_threshold, static_argnames=("cap", "scale", "renormalize"))


def test_scores_are_sigmoids_of_float32_logits():
    x_ND = jnp.asarray(RNG.normal(size=(8, 64)), jnp.bfloat16)
    w_DE = jnp.asarray(RNG.normal(size=(64, E)), jnp.bfloat16)
    s_NE = router_scores(x_ND, w_DE)
    logits = np.asarray(x_ND, np.float64) @ np.asarray(w_DE, np.float64)
    assert s_NE.dtype == jnp.float32
    # Far below 2**-9: the sum over 64 terms was never rounded to bfloat16.
    np.testing.assert_allclose(s_NE, 1 / (1 + np.exp(-logits)), rtol=1e-5)
    with jax.enable_x64(True):
        assert router_scores(jnp.ones((2, 3)), jnp.ones((3, E))).dtype == jnp.float64
    with pytest.raises(ValueError, match=r"\[N, D\].*\(8, 64\)"):
        router_scores(x_ND, w_DE[1:])


@pytest.mark.parametrize("active", [1, 3, E - 1])
def test_top_k_matches_its_definition(active):
    with jax.enable_x64(True):
        routing = top_k(SCORES, BIAS, active=active, scale=2.5)
    order = np.argsort(-(SCORES + BIAS), axis=1)
    chosen = order[:, :active]
    np.testing.assert_array_equal(routing.experts_NA, chosen)
    raw = np.take_along_axis(SCORES, chosen, 1)
    np.testing.assert_allclose(
        routing.weights_NA, 2.5 * raw / raw.sum(1, keepdims=True), rtol=1e-14
    )
    next_best = np.take_along_axis(SCORES + BIAS, order[:, active : active + 1], 1)
    np.testing.assert_allclose(routing.cutoff_N, next_best[:, 0], rtol=1e-15)
    assert routing.experts_NA.dtype == np.int32 and routing.mask_N is None


def test_all_experts_active_has_no_cutoff():
    routing = top_k(SCORES, BIAS, active=E, scale=1.0)
    np.testing.assert_array_equal(np.sort(routing.experts_NA, 1), [list(range(E))] * N)
    np.testing.assert_array_equal(routing.cutoff_N, -np.inf)


def test_without_renormalization_weights_are_scaled_scores():
    routing = top_k(SCORES, BIAS, active=2, scale=3.0, renormalize=False)
    raw = np.take_along_axis(SCORES, np.asarray(routing.experts_NA), 1)
    np.testing.assert_allclose(routing.weights_NA, 3 * raw, rtol=1e-6)


def test_choosing_does_not_sort_all_experts():
    scores_NE, bias_E = np.zeros((16, 64), np.float32), np.zeros(64, np.float32)
    for call in (
        top_k.lower(scores_NE, bias_E, active=4, scale=1.0),
        threshold.lower(scores_NE, bias_E, cap=4, scale=1.0),
    ):
        program = call.compile().as_text()
        assert "TopK" in program and " sort(" not in program


def test_ties_go_to_the_lower_index():
    routing = top_k(np.full((2, E), 0.5), np.zeros(E), active=3, scale=1.0)
    np.testing.assert_array_equal(routing.experts_NA, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(routing.cutoff_N, 0.5)
    np.testing.assert_allclose(routing.weights_NA, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("route", [top_k, threshold])
def test_no_gradient_reaches_the_state_and_all_of_it_reaches_the_scores(route):
    slots = {"active": 3} if route is top_k else {"cap": 3}

    @jax.jit
    def loss(scores_NE, state_E):
        routing = route(scores_NE, state_E, **slots, scale=1.0)
        return jnp.sum(routing.weights_NA**2) + jnp.sum(routing.weights_NA[:, 0])

    with jax.enable_x64(True):
        state = BIAS if route is top_k else np.full(E, 0.5)
        d_scores, d_state = jax.jit(jax.grad(loss, (0, 1)))(SCORES, state)
        assert not d_state.any()
        experts = np.asarray(route(SCORES, state, **slots, scale=1.0).experts_NA)
        chosen = np.concatenate([np.eye(E), np.zeros((1, E))])[experts].any(1)
        assert not d_scores[~chosen].any()
        value = functools.partial(loss, state_E=state)
        rest = np.random.default_rng(1).normal(size=SCORES.shape)
        step = 1e-6 * rest
        slope = (value(SCORES + step) - value(SCORES - step)) / 2e-6
        np.testing.assert_allclose(np.sum(d_scores * rest), slope, rtol=1e-7)


@pytest.mark.parametrize("route", [top_k, threshold])
def test_padding_has_no_expert_and_changes_no_other_token(route):
    slots = {"active": 3} if route is top_k else {"cap": 3}
    state = BIAS if route is top_k else np.full(E, 0.5)
    masked = route(SCORES, state, **slots, scale=1.0, mask_N=MASK)
    plain = route(SCORES, state, **slots, scale=1.0)
    np.testing.assert_array_equal(masked.experts_NA[~MASK], E)
    np.testing.assert_array_equal(masked.weights_NA[~MASK], 0)
    chex.assert_trees_all_equal(
        (masked.experts_NA[MASK], masked.weights_NA[MASK]),
        (plain.experts_NA[MASK], plain.weights_NA[MASK]),
    )
    np.testing.assert_array_equal(masked.mask_N, MASK)


def test_threshold_uses_what_passes_up_to_the_cap():
    limits = np.linspace(0.6, 0.95, E)
    routing = threshold(SCORES, limits, cap=3, scale=2.0)
    experts_NA, weights_NA = (
        np.asarray(routing.experts_NA),
        np.asarray(routing.weights_NA),
    )
    for n in range(N):
        margin = SCORES[n] - limits
        expected = [e for e in np.argsort(-margin) if margin[e] > 0][:3]
        used = experts_NA[n] < E
        assert experts_NA[n][used].tolist() == expected
        assert used.tolist() == [a < len(expected) for a in range(3)]
        raw = SCORES[n, expected]
        np.testing.assert_allclose(
            weights_NA[n][used], 2 * raw / max(raw.sum(), 1e-9), rtol=1e-6
        )
        assert not weights_NA[n][~used].any()
    counts = np.sum(experts_NA < E, axis=1)
    assert set(counts.tolist()) == {0, 1, 2, 3}  # the case is not a trivial one
    assert routing.cutoff_N is None


def test_zero_thresholds_are_top_k():
    free = threshold(SCORES, np.zeros(E), cap=3, scale=1.0)
    best = top_k(SCORES, np.zeros(E), active=3, scale=1.0)
    chex.assert_trees_all_equal(free[:2], best[:2])


def test_a_token_over_no_threshold_has_finite_gradients():
    def loss(scores_NE):
        return jnp.sum(threshold(scores_NE, np.ones(E), cap=2, scale=1.0).weights_NA)

    with jax.debug_nans(True):
        value, grads = jax.value_and_grad(loss)(jnp.asarray(SCORES, jnp.float32))
    assert value == 0 and not grads.any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: route_top_k(SCORES, BIAS, active=0, scale=1.0), "active=0.*<= 7"),
        (lambda: route_top_k(SCORES, BIAS, active=8, scale=1.0), "active=8.*<= 7"),
        (lambda: route_threshold(SCORES, BIAS, cap=8, scale=1.0), "cap=8.*<= 7"),
        (lambda: route_top_k(SCORES, BIAS[1:], active=2, scale=1.0), r"\(6,\).*\(7,\)"),
        (lambda: route_top_k(SCORES[None], BIAS, active=2, scale=1.0), "flatten"),
        (
            lambda: route_top_k(
                SCORES, BIAS, active=2, scale=1.0, mask_N=MASK.astype(int)
            ),
            "bool",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_dropped_slots_and_bare_tokens_by_loops():
    """Thresholds that leave some tokens nothing and others more than the cap."""
    over_E = np.linspace(0.5, 0.95, E)
    got = dropped(threshold(SCORES, over_E, cap=2, scale=1.0, mask_N=MASK), E)
    wanted = [(SCORES[n] > over_E).sum() for n in range(N) if MASK[n]]
    assert got["dropped_slots"] == sum(max(count - 2, 0) for count in wanted) > 0
    assert got["unrouted_tokens"] == wanted.count(0) > 0
    got = dropped(top_k(SCORES, BIAS, active=2, scale=1.0, mask_N=MASK), E)
    assert got["dropped_slots"] == got["unrouted_tokens"] == 0


@pytest.mark.parametrize("route", [top_k, threshold])
def test_replayed_experts_get_the_weights_and_gradients_of_here(route):
    """Some tokens replay, some choose freely, some are padding; by loops, float64."""
    slots = {"active": 3} if route is top_k else {"cap": 3}
    state = BIAS if route is top_k else np.linspace(0.5, 0.95, E)
    rng = np.random.default_rng(3)
    given = rng.random((N, E)).argsort(1)[:, :3].astype(np.int32)
    given[1, 2] = E  # fewer experts than slots
    given[rng.random(N) < 0.4] = E
    given[MASK.argmin()], given[MASK.argmax()] = 0, 1  # some of either kind
    shown = rng.normal(size=(N, E))

    def by_hand(scores_NE, free_NA):
        total = 0
        for n in range(N):
            own = given[n] if MASK[n] and (given[n] < E).any() else free_NA[n]
            used = [e for e in own if e < E]
            for e in used:
                weight = 2.5 * scores_NE[n, e] / sum(scores_NE[n, e] for e in used)
                total += shown[n, e] * weight
        return total

    def ours(scores_NE):
        free = route(scores_NE, state, **slots, scale=2.5, mask_N=MASK)
        done = replay(free, scores_NE, given, scale=2.5)
        shown_NA = jnp.take_along_axis(shown, done.experts_NA % E, axis=1)
        return jnp.sum(shown_NA * done.weights_NA), (free, done)

    with jax.enable_x64(True):
        grads, (free, done) = jax.jit(jax.grad(ours, has_aux=True))(SCORES)
        free_NA, done_NA = np.asarray(free.experts_NA), np.asarray(done.experts_NA)
        for n in range(N):
            step = np.zeros((N, E))
            step[n] = 1e-6
            for e in range(0, E, 3):
                one = step * np.eye(E)[e]
                up, down = (
                    by_hand(SCORES + one, free_NA),
                    by_hand(SCORES - one, free_NA),
                )
                np.testing.assert_allclose(grads[n, e], (up - down) / 2e-6, atol=1e-8)
        np.testing.assert_allclose(ours(SCORES)[0], by_hand(SCORES, free_NA))
    given_N = MASK & (given < E).any(1)
    assert 0 < given_N.sum() < MASK.sum()
    np.testing.assert_array_equal(done_NA[given_N], given[given_N])
    np.testing.assert_array_equal(done_NA[~given_N], free_NA[~given_N])
    assert done.cutoff_N is free.cutoff_N or (done.cutoff_N == free.cutoff_N).all()
    found = agreement(free, given, E)
    pairs = [(n, e) for n in np.flatnonzero(given_N) for e in given[n] if e < E]
    assert found["replayed_slots"] == len(pairs)
    assert found["agreed_slots"] == sum(e in free_NA[n] for n, e in pairs)
    with pytest.raises(ValueError, match="record them with the same model"):
        replay(free, SCORES, given[:, :2], scale=1.0)
