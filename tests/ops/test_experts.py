"""Sorted experts against dense ones, in value and in every gradient."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.experts import (
    Computed,
    blocked_experts,
    choose_experts,
    default_block_rows,
    dense_experts,
    experts,
    padded_experts,
    ragged_experts,
)
from kimi_jax.ops.grouped_matmul import Groups, grouped_matmul


def activation(gate, up):
    return jax.nn.silu(gate) * jnp.tanh(up)


def make(N, A, E, L=6, F=5, *, seed=0, dtype=np.float64, skip=0.0, expert=None):
    """Random arguments of `experts`; experts of one token may repeat."""
    rng = np.random.default_rng(seed)
    experts_NA = (
        rng.integers(0, E, (N, A)) if expert is None else np.full((N, A), expert)
    )
    experts_NA = np.where(rng.random((N, A)) < skip, E, experts_NA).astype(np.int32)
    shapes = [(N, L), (N, A), (E, L, F), (E, L, F), (E, F, L)]
    x, weights, *matrices = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return x, jnp.asarray(experts_NA), weights, *matrices


@functools.partial(jax.jit, static_argnames=("function", "block_rows"))
def value_and_grads(function, args, block_rows=None):
    x, experts_NA, *rest = args
    options = {} if block_rows is None else {"block_rows": block_rows}
    weight_dtype = rest[0].dtype

    def loss(floats):
        y_NL = function(floats[0], experts_NA, *floats[1:], activation, **options).y_NL
        cotangent_NL = 2 + jnp.cos(jnp.arange(y_NL.size, dtype=weight_dtype))
        return jnp.sum(y_NL * cotangent_NL.reshape(y_NL.shape), dtype=weight_dtype)

    y_NL = function(x, experts_NA, *rest, activation, **options).y_NL
    return y_NL, jax.grad(loss)((x, *rest))


COMMON = {"N": 23, "A": 3, "E": 7}  # one compilation serves all cases of it
CASES = {
    "spread": (COMMON, 4),
    "skipped": (COMMON | {"skip": 0.4}, 4),
    "all_skipped": (COMMON | {"skip": 1.0}, 4),
    "one_expert_has_all": (COMMON | {"expert": 3}, 4),
    "one_expert_in_blocks_of_one_row": ({"N": 11, "A": 2, "E": 1}, 1),
    "one_token_and_many_experts": ({"N": 1, "A": 4, "E": 40}, None),
    "no_token": ({"N": 0, "A": 2, "E": 3}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_blocked_equals_dense(case):
    shape, block_rows = CASES[case]
    with jax.enable_x64(True):
        args = make(**shape)
        expected = value_and_grads(dense_experts, args)
        got = value_and_grads(blocked_experts, args, block_rows)
    assert got[0].dtype == np.float64
    chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", ["skipped", "one_expert_has_all", "no_token"])
def test_ragged_equals_dense(case):
    with jax.enable_x64(True):
        args = make(**CASES[case][0])
        expected = value_and_grads(dense_experts, args)
        got = value_and_grads(ragged_experts, args)
    chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
def test_grouped_matmul_multiplies_each_block_by_its_matrix(implementation):
    rng = np.random.default_rng(0)
    x_PI = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    w_EIO = jnp.asarray(rng.normal(size=(3, 3, 2)), jnp.float32)
    # Blocks of 2 rows: two of group 0, none of group 1, one of group 2, one unused.
    groups = Groups(jnp.array([0, 0, 2, 2]), jnp.array([4, 0, 2]))
    y_PO = grouped_matmul(x_PI, w_EIO, groups, implementation=implementation)
    expected = np.concatenate([x_PI[:4] @ w_EIO[0], x_PI[4:6] @ w_EIO[2]])
    np.testing.assert_allclose(y_PO[:6], expected, rtol=1e-5, atol=1e-6)


def test_padded_keeps_the_first_choices_of_an_expert():
    x, _, weights, *matrices = make(4, 2, 3, dtype=np.float32)
    experts_NA = jnp.array([[0, 1], [0, 1], [1, 0], [2, 0]], jnp.int32)
    # Expert 0 has two first choices and two second ones, of tokens 2 and 3.
    args = (weights, *matrices, activation)
    run = jax.jit(padded_experts, static_argnames=("activation", "capacity"))
    got, dropped, _ = run(x, experts_NA, *args, capacity=3)
    kept_NA = experts_NA.at[3, 1].set(3)
    expected = dense_experts(x, kept_NA, *args).y_NL
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert dropped == 1
    got, dropped, _ = padded_experts(x[:0], experts_NA[:0], None, *args[1:], capacity=3)
    assert got.shape == (0, 6) and dropped == 0
    with pytest.raises(ValueError, match="capacity=0"):
        padded_experts(x, experts_NA, *args, capacity=0)


def test_no_weights_means_weights_of_one():
    x, experts_NA, weights, *matrices = make(23, 1, 7, dtype=np.float32)
    for name in ("blocked", "dense"):
        run = jax.jit(experts, static_argnames=("activation", "implementation"))
        got, expected = (
            run(x, experts_NA, w, *matrices, activation, implementation=name).y_NL
            for w in (None, jnp.ones_like(weights))
        )
        np.testing.assert_array_equal(got, expected)


def test_dense_equals_a_loop_over_slots():
    with jax.enable_x64(True):
        args = make(13, 3, 4, skip=0.3)
        x, experts_NA, weights, gate, up, down = map(np.asarray, args)
        expected = np.zeros_like(x)
        for n, a in np.ndindex(experts_NA.shape):
            e = experts_NA[n, a]
            if e < 4:
                g, u = x[n] @ gate[e], x[n] @ up[e]
                hidden = g / (1 + np.exp(-g)) * np.tanh(u)
                expected[n] += weights[n, a] * (hidden @ down[e])
        got, _ = value_and_grads(dense_experts, args)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("skip", [0.3, 1.0])
def test_the_largest_hidden_activation_is_of_used_slots(skip):
    """cosh(0) = 1: an unused slot would count if it were not masked."""

    def positive(gate, up):
        return jnp.cosh(gate / 8) + 0 * up

    args = make(13, 3, 4, skip=skip, dtype=np.float32)
    x, experts_NA, _, gate, _, _ = map(np.asarray, args)
    used = np.argwhere(experts_NA < 4)
    want = max(
        (np.cosh(x[n] @ gate[experts_NA[n, a]] / 8).max() for n, a in used), default=0
    )
    for function in (dense_experts, blocked_experts, ragged_experts):
        got = function(*args, positive).hidden_max
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_token_without_experts_is_exactly_zero():
    x, experts_NA, *rest = make(8, 2, 3, dtype=np.float32)
    args = (x, experts_NA.at[5].set(3), *rest)
    for function in (blocked_experts, dense_experts):
        y_NL, grads = value_and_grads(function, args)
        assert not y_NL[5].any() and y_NL[4].any()
        assert not grads[0][5].any() and not grads[1][5].any()


def test_unknown_expert_indices_are_skipped_by_both():
    x, experts_NA, *rest = make(8, 2, 3, dtype=np.float32)
    odd = experts_NA.at[0, 0].set(-1).at[1, 1].set(7)
    none = experts_NA.at[0, 0].set(3).at[1, 1].set(3)
    for function in (blocked_experts, dense_experts):
        chex.assert_trees_all_equal(
            value_and_grads(function, (x, odd, *rest)),
            value_and_grads(function, (x, none, *rest)),
        )


def test_bfloat16_sums_slots_and_blocks_in_float32():
    # 128 slots of one expert in 32 blocks, all terms of one sign: adding the blocks'
    # gradients up in bfloat16 gives the matrices errors of 0.007 and more.
    x, experts_NA, weights, *matrices = make(16, 8, 2, dtype=jnp.bfloat16, expert=1)
    matrices = [jnp.abs(matrix) / 8 for matrix in matrices]
    weights = jnp.abs(weights).astype(jnp.float32)
    args = (jnp.abs(x), experts_NA, weights, *matrices)
    wide = [a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for a in args]
    expected = value_and_grads(dense_experts, tuple(wide))
    got = value_and_grads(blocked_experts, args, 4)
    assert experts(*args, activation).y_NL.dtype == jnp.bfloat16
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 0.004, error  # two roundings of 2**-9
    assert got[0].dtype == jnp.float32
    assert [g.dtype for g in got[1]] == [x.dtype, weights.dtype] + [x.dtype] * 3


def test_sharding_over_tokens_changes_nothing():
    with jax.enable_x64(True):
        args = make(64, 2, 5, skip=0.1)
        expected = value_and_grads(blocked_experts, args, 8)
        mesh = Mesh(np.array(jax.devices()), ("data",))
        tokens, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        shardings = (tokens,) * 3 + (whole,) * 3
        assert len(mesh.devices) == 8
        got = value_and_grads(blocked_experts, jax.device_put(args, shardings), 8)
    chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-13)


def test_shard_map_over_tokens_changes_nothing():
    with jax.enable_x64(True):
        args = make(64, 2, 5, skip=0.1)
        mesh = Mesh(np.array(jax.devices()), ("data",))
        local = jax.shard_map(
            lambda *args: Computed(
                blocked_experts(*args, activation, block_rows=4).y_NL, 0, 0
            ),
            mesh=mesh,
            in_specs=(P("data"),) * 3 + (P(),) * 3,
            out_specs=Computed(P("data"), P(), P()),
        )
        expected = value_and_grads(blocked_experts, args, 8)
        got = value_and_grads(lambda *args: local(*args[:-1]), args)
    chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-13)


def test_work_is_bounded_by_the_slots_not_by_the_experts():
    args = make(64, 4, 512, dtype=np.float32)
    jaxpr = str(jax.make_jaxpr(lambda a: blocked_experts(*a, activation).y_NL)(args))
    # 256 slots touch at most 256 experts: 256 blocks of 16 rows, not 512.
    assert "f32[256,16,5]" in jaxpr and "512,16" not in jaxpr


def test_default_block_rows():
    assert default_block_rows(4096 * 4, 16) == 256
    assert default_block_rows(1024 * 16, 896) == 16
    assert default_block_rows(1, 896) == 16


def test_implementation_is_chosen_by_name():
    args = make(8, 2, 3, dtype=np.float32)

    def program(function, **options):
        return str(jax.make_jaxpr(lambda a: function(*a, activation, **options))(args))

    dense, blocked = program(dense_experts), program(blocked_experts)
    ragged = program(ragged_experts)
    assert program(experts, implementation="dense") == dense != blocked
    assert program(experts, implementation="blocked") == blocked == program(experts)
    assert program(experts, implementation="ragged") == ragged != blocked
    with pytest.raises(
        ValueError, match=r"'fast'.*blocked, ragged, dense, padded, or None"
    ):
        experts(*args, activation, implementation="fast")


def test_nobody_lands_on_a_slow_matmul_unawares():
    assert choose_experts(None, "tpu")[0] == "ragged"
    for platform, why in [("gpu", "41 TFLOP/s"), ("cpu", "every expert")]:
        name, reason = choose_experts(None, platform)
        assert name == "blocked" and why in reason
        name, reason = choose_experts("ragged", platform)
        assert name == "ragged" and "slow" in reason and "'blocked'" in reason
    assert choose_experts("blocked", "gpu") == ("blocked", "asked for by name")
    assert "every token" in choose_experts("dense", "tpu")[1]


def test_bad_arguments_are_named():
    x, experts_NA, weights, gate, up, down = make(8, 2, 3, dtype=np.float32)
    with pytest.raises(ValueError, match=r"w_down_EFL.*\(3, 6, 5\).*\(3, 5, 6\)"):
        experts(x, experts_NA, weights, gate, up, gate, activation)
    with pytest.raises(ValueError, match=r"weights_NA.*\(8, 1\)"):
        experts(x, experts_NA, weights[:, :1], gate, up, down, activation)
    with pytest.raises(ValueError, match="integers"):
        experts(x, weights, weights, gate, up, down, activation)
    with pytest.raises(ValueError, match="flatten"):
        experts(x[None], experts_NA, weights, gate, up, down, activation)
    with pytest.raises(ValueError, match="block_rows=0"):
        blocked_experts(
            x, experts_NA, weights, gate, up, down, activation, block_rows=0
        )
