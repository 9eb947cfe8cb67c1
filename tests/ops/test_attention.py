"""Block-wise attention against the plain one, in value and gradient."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.attention import (
    attention,
    attention_reference,
    attention_with_max_logits,
)

SCALE = 0.3
# One row of each kind: packed, padded at both ends, an id that returns, one document.
IDS = np.zeros((4, 33), np.int32)
IDS[0, :9], IDS[0, 9:10], IDS[0, 10:] = 1, 2, 3
IDS[1, 5:30] = 4
IDS[2, :12], IDS[2, 12:20], IDS[2, 20:31] = 1, 2, 1
IDS[3] = 7


def draw(T, H=6, G=2, B=4, K=6, V=5, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, V), (B, T, H, V)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@cache
def runner(op, **options):
    """Output and gradients (of a random projection of the output), jitted."""

    @jax.jit
    def run(q, k, v, do, segment_ids):
        def f(q, k, v):
            return op(q, k, v, scale=SCALE, segment_ids_BT=segment_ids, **options)

        o, pullback = jax.vjp(f, q, k, v)
        return o, pullback(do.astype(o.dtype))

    return run


reference = runner(attention_reference)


@pytest.mark.parametrize(
    ("T", "block_size", "packed"),
    [
        (1, 16, False),
        (7, 7, True),
        (33, 64, True),
        (33, 16, True),
        (33, 4, False),
    ],
)
def test_value_and_gradient_match_the_reference(T, block_size, packed):
    ids = IDS[:, :T] if packed else None
    with jax.enable_x64(True):
        args = draw(T)
        got = runner(attention, block_size=block_size)(*args, ids)
        assert got[0].dtype == jnp.float64
        chex.assert_trees_all_close(got, reference(*args, ids), atol=1e-13, rtol=0)


@pytest.mark.parametrize("block_size", [4, 64])
def test_max_logits_are_those_that_the_softmax_sees(block_size):
    """Not padding, no other document, no later token; the output and gradients stay."""
    q, k, v, do = draw(33)
    q[IDS == 0] *= 100  # padding that would win
    loops = np.full(6, -np.inf)
    for b, t, h in np.ndindex(4, 33, 6):
        start = t
        while start > 0 and IDS[b, start - 1] == IDS[b, t]:
            start -= 1
        if IDS[b, t] > 0:
            scores = SCALE * k[b, start : t + 1, h // 3] @ q[b, t, h]
            loops[h] = max(loops[h], scores.max())

    with jax.enable_x64(True):
        options = {"scale": SCALE, "segment_ids_BT": IDS, "block_size": block_size}

        @jax.jit
        def run(q, k, v, do):
            watched = partial(attention_with_max_logits, **options)
            o, pull, max_H = jax.vjp(watched, q, k, v, has_aux=True)
            return (o, pull(do)), max_H

        got, max_H = run(q, k, v, do)
        np.testing.assert_allclose(max_H, loops, rtol=1e-13)
        assert len(set(loops)) == 6
        plain = runner(attention, block_size=block_size)(q, k, v, do, IDS)
        chex.assert_trees_all_close(got, plain, atol=1e-13, rtol=0)


def test_max_logits_carry_no_gradient_and_padding_has_none():
    q, k, v, _ = draw(8, dtype=np.float32)

    @jax.jit
    @jax.value_and_grad
    def run(q, ids):
        _, max_H = attention_with_max_logits(q, k, v, scale=1.0, segment_ids_BT=ids)
        return jnp.max(max_H)

    largest, grad = run(q, jnp.ones((4, 8), jnp.int32))
    assert largest > 0 and not np.any(grad)
    assert run(q, jnp.zeros((4, 8), jnp.int32))[0] == -np.inf


def test_packed_equals_separate():
    run = runner(attention, block_size=16)
    spans = (0, 12), (12, 20), (20, 31)
    with jax.enable_x64(True):
        args = draw(33)
        packed = jax.tree.map(lambda x: x[2], run(*args, IDS))
        alone_ids = np.zeros_like(IDS)
        alone_args = [np.zeros_like(x) for x in args]
        for row, (a, b) in enumerate(spans):
            alone_ids[row, : b - a] = 1
            for alone, x in zip(alone_args, args, strict=True):
                alone[row, : b - a] = x[2, a:b]
        alone = run(*alone_args, alone_ids)
        for row, (a, b) in enumerate(spans):
            chex.assert_trees_all_close(
                jax.tree.map(lambda x, a=a, b=b: x[a:b], packed),
                jax.tree.map(lambda x, row=row, n=b - a: x[row, :n], alone),
                atol=1e-13,
                rtol=0,
            )


def test_no_gradient_crosses_documents():
    q, k, v, do = draw(33, dtype=np.float32)
    only_last = np.where(IDS[:, :, None, None] == 3, do, 0)
    _, grads = runner(attention, block_size=4)(q, k, v, only_last, IDS)
    for grad in grads:
        assert np.all(grad[0, :10] == 0) and np.any(grad[0, 10:] != 0)
        assert np.all(grad[1:] == 0)


def test_padding_is_inert():
    run = runner(attention, block_size=4)
    padding = (IDS == 0)[:, :, None, None]
    args = draw(33, dtype=np.float32)
    clean = run(*args, IDS)
    dirty = run(*(np.where(padding, np.float32(1e4), x) for x in args), IDS)
    chex.assert_trees_all_equal(clean, dirty)
    for x in jax.tree.leaves(clean):
        assert np.all(np.where(padding, x, 0) == 0)


@pytest.mark.parametrize("block_size", [4, 64])
def test_causal_to_the_bit(block_size):
    run = runner(attention, block_size=block_size)
    q, k, v, do = draw(33, dtype=np.float32)
    cut = 18
    o, _ = run(q, k, v, do, IDS)
    changed = [np.concatenate([x[:, :cut], -x[:, cut:]], axis=1) for x in (q, k, v)]
    o_changed, _ = run(*changed, do, IDS)
    chex.assert_trees_all_equal(o[:, :cut], o_changed[:, :cut])
    later = np.any(np.asarray(o != o_changed)[:, cut:], axis=(2, 3))
    assert np.all(later == (IDS[:, cut:] > 0))


def test_hidden_blocks_are_never_read():
    # A NaN in a visited tile survives its zero weight, so it shows what was visited.
    q, k, v, do = draw(32, B=1, dtype=np.float32)
    ids = np.repeat(np.int32([[1, 2]]), 16, axis=1)
    run = runner(attention, block_size=4)
    future, past = v.copy(), v.copy()
    future[:, 16:] = np.nan
    past[:, :16] = np.nan
    o, (dq, _, _) = run(q, k, future, do, np.ones_like(ids))
    assert np.all(np.isfinite(o[:, :16])) and np.all(np.isfinite(dq[:, :16]))
    assert not np.any(np.isfinite(o[:, 16:]))
    o, (dq, _, _) = run(q, k, past, do, ids)
    assert np.all(np.isfinite(o[:, 16:])) and np.all(np.isfinite(dq[:, 16:]))


def test_large_scores_do_not_overflow():
    q, k, v, do = draw(33, dtype=np.float32)
    args = 1e3 * q, 1e3 * k, v, do
    o, grads = runner(attention, block_size=4)(*args, IDS)
    chex.assert_tree_all_finite((o, grads))
    with jax.enable_x64(True):
        exact, _ = reference(*(x.astype(np.float64) for x in args), IDS)
    # Scores of 1e6 carry float32 errors of 0.1, so only clear winners can agree.
    clear = np.abs(np.asarray(o) - np.asarray(exact)).max(axis=(2, 3)) < 1e-5
    assert clear.mean() > 0.9


def test_bfloat16_inputs():
    args = [jnp.asarray(x, jnp.bfloat16) for x in draw(33)]
    o, grads = runner(attention, block_size=4)(*args, IDS)
    assert o.dtype == jnp.float32
    assert {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in args]
        exact_o, exact_grads = reference(*wide, IDS)
    # Probabilities are rounded to 8 bits before they meet the values: each term is off
    # by at most 2^-9 of itself, and |v| < 4. Gradients pass a few such roundings.
    assert np.abs(np.asarray(o) - np.asarray(exact_o)).max() < 4 * 2.0**-9
    for g, exact in zip(grads, exact_grads, strict=True):
        error = np.asarray(g, np.float64) - np.asarray(exact)
        assert np.linalg.norm(error) < 2.0**-8 * np.linalg.norm(exact)


def arrays(jaxpr):
    """Every array made anywhere inside a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for param in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from arrays(inner)


@pytest.mark.parametrize("packed", [False, True])
def test_no_array_is_quadratic_in_time(packed):
    T, C, H = 1024, 256, 2
    args = draw(T, H=H, B=1, K=8, V=8, dtype=np.float32)
    ids = jnp.ones((1, T), jnp.int32) if packed else None
    whole = 4 * H * T * T

    def made(run):
        return max(a.size * 4 for a in arrays(jax.make_jaxpr(run)(*args, ids).jaxpr))

    run = runner(attention, block_size=C)
    assert made(reference) >= whole  # the probe sees what it should
    assert made(run) <= 4 * H * C * C
    watched = partial(attention_with_max_logits, scale=SCALE, block_size=C)
    assert made(lambda q, k, v, _, ids: watched(q, k, v, segment_ids_BT=ids)) < whole
    compiled = run.lower(*args, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


def test_sharded_batch_and_heads_need_no_communication():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    args = draw(32, H=4, G=2, dtype=np.float32)
    sharded = [jax.device_put(x, sharding) for x in args]
    run = runner(attention, block_size=16).lower(*sharded, None).compile()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in run.as_text()
    chex.assert_trees_all_close(
        run(*sharded, None), reference(*args, None), atol=1e-5, rtol=1e-5
    )


def test_bad_arguments_are_named():
    q, k, v, _ = draw(8, H=4, dtype=np.float32)
    attend = partial(attention, scale=SCALE)
    with pytest.raises(ValueError, match=r"v \(4, 7, 2, 5\)"):
        attend(q, k, v[:, :7])
    with pytest.raises(ValueError, match="four axes"):
        attend(q[0], k, v)
    with pytest.raises(ValueError, match="H=3 query heads and G=2 key heads"):
        attend(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="dtypes"):
        attend(q.astype(jnp.bfloat16), k, v)
    with pytest.raises(ValueError, match="block_size is 0"):
        attend(q, k, v, block_size=0)
    with pytest.raises(ValueError, match="segment_ids_BT"):
        attend(q, k, v, segment_ids_BT=jnp.ones((4, 9), jnp.int32))
