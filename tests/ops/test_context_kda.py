"""KDA over a split time axis against the same call on one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.hlo import collective_bytes
from kimi_jax.ops.context_kda import context_kda
from pallas_kernels.kda import kda
from tests.ops.context_cases import (
    AXIS,
    SAME,
    SPLIT,
    assert_close,
    over,
    with_gradients,
)
from tests.pallas_kernels import kda_cases as cases

# 8 ranks hold 21 tokens each, 4 hold 42: no multiple of a chunk, borders inside chunks.
T, PIECE = 168, 21
SETTINGS = {"chunk_size": 16, "output_final_state": True}
SPECS = {n: SPLIT for n in cases.INPUTS[:5]} | {
    n: SAME for n in ("A_log", "dt_bias", "initial_state")
}


def documents():
    """Row 0: borders at, before and after rank borders, and through padding; row 1:
    padding first, then ranks of padding alone inside a document and at the end."""
    ids = np.zeros((2, T), np.int32)
    ids[0, : PIECE - 1], ids[0, PIECE - 1 : 2 * PIECE] = 3, 1
    ids[0, 2 * PIECE : 3 * PIECE + 1], ids[0, 3 * PIECE + 1 : 90] = 2, 1
    ids[0, 90:100], ids[0, 106:] = 5, 4
    ids[1, PIECE + 5 : 2 * PIECE], ids[1, 3 * PIECE + 2 : 120] = 7, 7
    ids[1, 120:125] = 8
    return ids


def call(op, x, ids, **settings):
    rest = {name: x[name] for name in cases.INPUTS[5:] if name in x}
    tensors = [x[name] for name in cases.INPUTS[:5]]
    return op(*tensors, **rest, segment_ids=ids, **SETTINGS, **settings)


@cache
def runner(ranks, names, packed=True, check_vma=True, **settings):
    def single(x, ids):
        return call(kda, x, ids, **settings)

    def local(x, ids):
        return call(context_kda, x, ids, axis=AXIS, **settings)

    if ranks == 1:
        return with_gradients(single)
    specs = {name: SPECS[name] for name in names}, SPLIT if packed else None
    return with_gradients(over(ranks, local, specs, (SPLIT, SAME), check_vma=check_vma))


def compare(ranks, x, ids, tolerance, check_vma=True, **settings):
    form = tuple(x), ids is not None
    got = runner(ranks, *form, check_vma, **settings)(x, ids)
    expected = runner(1, *form, **settings)(x, ids)
    assert_close(got, expected, tolerance)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "random"),
        (4, "random"),
        (8, "random"),
        (8, "floor"),
        (8, "near duplicates"),
        (8, "identical keys"),
        (8, "beta 0 or 1"),
        (8, "beta up to 2"),
        (8, "no decay"),
        (4, "steps"),
    ],
)
def test_packed_equals_one_device(ranks, kind):
    """Value heads share a key head. Four ranks do without varying types."""
    with jax.enable_x64(True):
        x, check_vma = cases.prepared(kind, T), ranks != 4
        compare(ranks, x, documents(), 1e-10, check_vma)


@pytest.mark.parametrize("kind", ["floor", "near duplicates", "beta 0 or 1"])
def test_one_document_equals_one_device(kind):
    """Without ids one document passes all borders; ids of ones say the same."""
    with jax.enable_x64(True):
        x = cases.prepared(kind, T)
        compare(8, x, np.ones((2, T), np.int32), 1e-10)


def test_float32_without_ids_and_state():
    """The layer's own form: gates in the kernel, whose parameters all ranks share."""
    x = {name: np.float32(a) for name, a in cases.raw(T).items()}
    del x["initial_state"]
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0}
    compare(8, x, None, 1e-5, **settings)


def test_bfloat16_output_is_rounded_once():
    x = {name: jnp.asarray(a, jnp.bfloat16) for name, a in cases.raw(T).items()}
    x["initial_state"] = x["initial_state"].astype(jnp.float32)
    names = "q", "k", "v", "g", "beta", "initial_state"
    x = {name: x[name] for name in names} | {"g": -jnp.abs(x["g"])}
    settings = {"use_qk_l2norm": True, "use_beta_sigmoid": True}

    def local(x, ids):
        return call(context_kda, x, ids, axis=AXIS, **settings)

    specs = {name: SPECS[name] for name in names}, SPLIT
    o, state = jax.jit(over(8, local, specs, (SPLIT, SAME)))(x, documents())
    wide = {name: a.astype(jnp.float32) for name, a in x.items()}
    single = jax.jit(lambda x: call(kda, x, documents(), **settings))
    exact, exact_state = map(np.asarray, single(wide))
    assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # One rounding to 8 bits, and sums in float32.
    np.testing.assert_allclose(np.float32(o), exact, rtol=2.0**-8, atol=1e-5)
    np.testing.assert_allclose(state, exact_state, atol=1e-5)


def test_bytes_that_cross_the_wire():
    """K (K + V) float32 a head and rank, each way; and two ids a row."""
    K, H, B, ranks = 128, 2, 1, 8
    wide = jax.ShapeDtypeStruct((B, 2 * ranks, H, K), jnp.float32)
    beta = jax.ShapeDtypeStruct(wide.shape[:3], jnp.float32)
    ids = jax.ShapeDtypeStruct((B, 2 * ranks), jnp.int32)

    def local(*x):
        return context_kda(*x[:5], axis=AXIS, segment_ids=x[5])[0]

    def loss(*x):
        return jnp.sum(jnp.sin(over(ranks, local, (SPLIT,) * 6, SPLIT)(*x)))

    gradient = jax.jit(jax.grad(loss, argnums=range(5)))
    text = gradient.lower(*[wide] * 4, beta, ids).compile().as_text()
    found = collective_bytes(text)
    budget = 128 * 2**10 * H * B * ranks
    assert set(found) == {"all-gather", "reduce-scatter"}
    assert all(one.exact for one in found.values())
    assert found["all-gather"].bytes == budget + 2 * 4 * B * ranks
    assert found["reduce-scatter"].bytes == budget


def test_bad_arguments_are_named_before_the_columns_are_added():
    x = cases.raw(16)
    x["initial_state"] = x["initial_state"].swapaxes(2, 3)
    run = over(
        2, lambda x: call(context_kda, x, None, axis=AXIS), (SPECS,), (SPLIT, SAME)
    )
    with pytest.raises(ValueError, match=r"the state is \[K, V\]"):
        jax.eval_shape(run, x)
