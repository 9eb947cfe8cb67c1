"""The chunked implementation against the recurrence in float64: values, all gradients.

Tolerances are relative to the largest entry of each array. float64 shows that the
algebra is exact; float32 stays near rounding; with bfloat16 inputs the arithmetic is
that of float32, so only the rounding of the results to bfloat16 remains.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda_step
from tests.pallas_kernels import kda_cases as cases

TOLERANCE = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 2.0**-8}


@cache
def expected(kind, dtype):
    x = cases.rounded(cases.prepared(kind), dtype)
    return cases.run(x, out=out(dtype), implementation="reference")


def out(dtype):
    """Gradients from above as a loss in that dtype would send them."""
    do, dstate = cases.cotangents()
    return tuple(cases.rounded({"o": do, "state": dstate}, dtype).values())


# Chunks of 64 exercise all levels of blocks; smaller ones compile faster.
@pytest.mark.parametrize(
    "dtype, chunk", [("float64", 64), ("float32", 64), ("bfloat16", 16)]
)
@pytest.mark.parametrize("kind", cases.BOUNDED_KINDS)
def test_bounded_gate(kind, dtype, chunk):
    settings = {"lower_bound": -5.0, "chunk_size": chunk}
    got = cases.run(cases.prepared(kind), out=out(dtype), dtype=dtype, **settings)
    cases.assert_close(got, expected(kind, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_any_gate(kind, dtype):
    got = cases.run(cases.prepared(kind), out=out(dtype), dtype=dtype, chunk_size=32)
    cases.assert_close(got, expected(kind, dtype), TOLERANCE[dtype])


def test_infinite_decay_forgets():
    x = cases.prepared("unbounded")
    x["g"][:, 40] = -np.inf
    do, dstate = cases.cotangents()
    do[:, :40] = 0
    got = cases.run(x, out=(do, dstate), dtype="float32", chunk_size=32)
    assert all(np.isfinite(value).all() for value in got.values())
    o, state = cases.oracle(cases.rounded(x, "float32"))
    outputs = {"o": got["o"], "state": got["state"]}
    cases.assert_close(outputs, {"o": o, "state": state}, TOLERANCE["float32"])
    assert np.all(got["dinitial_state"] == 0)
    assert np.all(got["dv"][:, :40] == 0)


@pytest.mark.parametrize("chunk", [16, 128])
def test_other_chunk_sizes(chunk):
    x = cases.prepared("random")
    got = cases.run(x, lower_bound=-5.0, chunk_size=chunk)
    cases.assert_close(got, expected("random", "float64"), TOLERANCE["float64"])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_norm_and_sigmoid_inside(lower_bound):
    settings = {**cases.IN_KERNEL, "lower_bound": lower_bound, "scale": 0.3}
    if lower_bound is None:
        settings["allow_neg_eigval"] = True
    x = cases.raw()
    got = cases.run(x, chunk_size=16, **settings)
    reference = cases.run(x, implementation="reference", **settings)
    assert {"dA_log", "ddt_bias"} <= got.keys()
    cases.assert_close(got, reference, TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("time", "chunk", "gradients"),
    [
        (1, 16, True),
        (15, 16, False),
        (16, 16, True),
        (17, 16, True),
        (63, 64, True),
        (64, 16, False),
        (65, 64, True),
        (127, 16, False),
    ],
)
def test_any_length(time, chunk, gradients):
    full = cases.prepared("random", 128)
    per_token = [name for name in full if name != "initial_state"]
    cut = {name: full[name][:, :time] for name in per_token}
    cut["initial_state"] = full["initial_state"]
    do, dstate = cases.cotangents(128)
    settings = {"lower_bound": -5.0, "chunk_size": chunk, "gradients": gradients}
    got = cases.run(cut, out=(do[:, :time], dstate), **settings)
    # One compiled reference serves all lengths: it treats the rest as padding.
    ids = np.broadcast_to(np.arange(128) < time, (cases.B, 128))
    reference = cases.run(full, ids, (do, dstate), implementation="reference")
    for name in reference:
        if name.removeprefix("d") in [*per_token, "o"]:
            assert np.all(reference[name][:, time:] == 0)
            reference[name] = reference[name][:, :time]
    reference = {name: reference[name] for name in got}
    cases.assert_close(got, reference, TOLERANCE["float64"])


@pytest.mark.parametrize("ids", [None, np.zeros((cases.B, 0))], ids=["plain", "packed"])
def test_no_tokens_return_the_state(ids):
    x = cases.prepared("random", 0)
    got = cases.run(x, ids)
    assert got["o"].shape == (cases.B, 0, cases.HV, cases.V)
    np.testing.assert_array_equal(got["state"], x["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], cases.cotangents(0)[1])


def test_gradient_through_one_output_alone():
    x = cases.prepared("random")
    do, dstate = cases.cotangents()
    for both in [(do, 0 * dstate), (0 * do, dstate)]:
        got = cases.run(x, out=both, lower_bound=-5.0, chunk_size=16)
        reference = cases.run(x, out=both, implementation="reference")
        cases.assert_close(got, reference, TOLERANCE["float64"])


def test_initial_state_defaults_to_zero():
    x = cases.prepared("random")
    zero = {**x, "initial_state": np.zeros_like(x["initial_state"])}
    del x["initial_state"]
    settings = {"gradients": False, "lower_bound": -5.0, "chunk_size": 16}
    got, same = cases.run(x, **settings), cases.run(zero, **settings)
    cases.assert_close(got, same, 1e-15)


def test_split_inside_a_tile_equals_whole():
    x = cases.prepared("random")
    settings = {"lower_bound": -5.0, "chunk_size": 16}
    whole = cases.run(x, **settings)
    whole = {name: whole[name] for name in ("o", "state")}
    settings["gradients"] = False
    cut = 61
    head = {n: a[:, :cut] for n, a in x.items() if n != "initial_state"}
    tail = {n: a[:, cut:] for n, a in x.items() if n != "initial_state"}
    first = cases.run({**head, "initial_state": x["initial_state"]}, **settings)
    second = cases.run({**tail, "initial_state": first["state"]}, **settings)
    o = np.concatenate([first["o"], second["o"]], axis=1)
    cases.assert_close({"o": o, "state": second["state"]}, whole, 1e-13)


@pytest.mark.parametrize("inside", [False, True], ids=["prepared", "raw"])
def test_single_steps_equal_whole(inside):
    flags = {"lower_bound": -5.0}
    if inside:
        flags |= {**cases.IN_KERNEL, "allow_neg_eigval": True, "scale": 0.3}
    x = cases.raw(40) if inside else cases.prepared("random", 40)
    whole = cases.run(x, gradients=False, chunk_size=16, **flags)
    with jax.enable_x64(True):
        state = jnp.asarray(x["initial_state"])
        gate = {n: jnp.asarray(x[n]) for n in ("A_log", "dt_bias") if n in x}

        def step(state, token):
            o, state = kda_step(*token, state, **gate, **flags)
            return state, o

        names = ("q", "k", "v", "g", "beta")
        tokens = tuple(jnp.moveaxis(jnp.asarray(x[n]), 1, 0) for n in names)
        state, o = cases.jit(partial(jax.lax.scan, step))(state, tokens)
        got = {"o": np.moveaxis(np.asarray(o), 0, 1), "state": np.asarray(state)}
    cases.assert_close(got, whole, 1e-13)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_outputs_ignore_the_future_to_the_last_bit(lower_bound):
    x = cases.prepared("random")
    settings = {"dtype": "float32", "gradients": False, "chunk_size": 32}
    settings["lower_bound"] = lower_bound
    before = cases.run(x, **settings)["o"]
    for time in (1, 17, 31, 64, 100):
        changed = {name: value.copy() for name, value in x.items()}
        changed["v"][:, time:] *= -1e3
        changed["k"][:, time:] = changed["k"][:, time:][:, ::-1]
        changed["g"][:, time:] = -5.0
        changed["beta"][:, time:] = 1.0
        after = cases.run(changed, **settings)["o"]
        np.testing.assert_array_equal(after[:, :time], before[:, :time])
        assert np.all(np.any(after[:, time:] != before[:, time:], axis=-1))
