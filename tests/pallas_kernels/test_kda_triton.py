"""The Triton kernels against the recurrence in float64: values and all gradients.

On a GPU they run as they are (JAX_PLATFORMS=cuda). Elsewhere Triton's interpreter runs
them, one numpy operation at a time, on the sizes it can bear.
"""

import functools

import jax
import numpy as np
import pytest

ON_GPU = jax.default_backend() == "gpu"
pytest.importorskip("triton")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from kimi_jax.ops.context_kda import context_kda  # noqa: E402
from pallas_kernels.kda import choose_implementation, kda, kda_step  # noqa: E402
from pallas_kernels.kda import plan as plans  # noqa: E402
from tests.pallas_kernels import kda_cases as cases  # noqa: E402

REPEATING = ("near duplicates", "identical keys")
LENGTHS = [20, 5, 50, 15]
IDS = np.array([np.repeat(ids, LENGTHS) for ids in ([1, 0, 3, 4], [0, 5, 5, 2])])
TIME = IDS.shape[1]


@pytest.fixture(autouse=True, scope="module")
def sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "K", 64 if ON_GPU else 32)
        patch.setattr(cases, "V", 128 if ON_GPU else 16)
        if not ON_GPU:
            repair_bfloat16(patch)
        yield


def repair_bfloat16(patch):
    """Triton 3.7's interpreter multiplies its bit patterns, and cuts off unrounded."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x, source, target, mode):
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        even = (bits >> 16) & 1
        return ((bits + 0x7FFF + even) >> 16).astype(np.uint16)

    patch.setattr(interpreter, "_convert_float", rounded)
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(x):
        if str(x.dtype.scalar) != "bf16":
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, d, *rest):
        return plain(self, widened(a), widened(b), d, *rest)

    patch.setattr(builder, "create_dot", create_dot)


compare = functools.partial(cases.compare, "triton")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_production_settings_packed(dtype, lower_bound):
    settings = {**cases.IN_KERNEL, "lower_bound": lower_bound, "scale": 0.3}
    compare(cases.raw(TIME), IDS, dtype, **settings)


@pytest.mark.parametrize("kind", ["floor", *REPEATING, "beta up to 2", "unbounded"])
def test_hard_inputs(kind):
    bound = None if kind == "unbounded" else -5.0
    compare(cases.prepared(kind, 70), lower_bound=bound)


def test_sums_over_tokens_are_as_exact_as_what_they_sum(monkeypatch):
    """A_log's gradient is one number a head, of all tokens' terms of both signs.

    Errors as in docs/kda_gpu.md: norms, relative to float64 on the rounded inputs. They
    scatter by half, so the bounds below 5e-3 are for the mean of squares of four draws.
    """
    monkeypatch.setattr(cases, "B", 1)
    monkeypatch.setattr(cases, "HV", 8)
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0}
    draw, found = cases.draw, []
    for first in (0, 100, 200, 300):
        monkeypatch.setattr(
            cases,
            "draw",
            lambda seed, *shape, first=first: draw(first + seed, *shape),
        )
        x = cases.rounded(cases.raw(128), "bfloat16")
        do, dstate = cases.cotangents(128)
        out = (cases.rounded({"do": do}, "bfloat16")["do"], dstate)
        expected = cases.run(x, out=out, implementation="reference", **settings)
        got = cases.run(
            x, out=out, dtype="bfloat16", implementation="triton", **settings
        )
        found.append(
            {
                name: np.linalg.norm(got[name] - y) / np.linalg.norm(y)
                for name, y in expected.items()
            }
        )
    assert max(max(error.values()) for error in found) < 5e-3
    bounds = {"dA_log": 3.6e-3, "ddt_bias": 3.3e-3, "dg": 3.3e-3}
    for name, bound in (dict.fromkeys(found[0], 4e-3) | bounds).items():
        assert np.sqrt(np.mean([error[name] ** 2 for error in found])) < bound, name


@pytest.mark.parametrize("kind", ["floor", "steps", *REPEATING])
def test_hard_inputs_in_bfloat16(kind):
    tolerance = 1.5e-2 if kind in REPEATING else None
    compare(cases.prepared(kind, 70), None, "bfloat16", tolerance, lower_bound=-5.0)


@pytest.mark.parametrize("time", [1, 15, 16, 17, 63, 64, 65])
def test_any_length(time):
    compare(cases.prepared("random", time), lower_bound=-5.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smaller_chunks_and_plain_write_strengths(dtype):
    """A write strength that is no sigmoid, 0 for some tokens, and normalised rows."""
    x = {**cases.raw(40), **cases.prepared("beta 0 or 1", 40)}
    del x["A_log"], x["dt_bias"]
    settings = {"lower_bound": -5.0, "chunk_size": 32, "use_qk_l2norm": True}
    compare(x, IDS[:, :40], dtype, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "packed"])
def test_segments_change_nothing(ids, monkeypatch):
    """A row cut into segments that run side by side, with summaries of each."""
    monkeypatch.setattr(plans, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(plans, "PROCESSORS", 1000)
    compare(cases.prepared("random", TIME), ids, lower_bound=-5.0, chunk_size=16)


def test_cutting_time_changes_no_bit(monkeypatch):
    """Who goes on starts from the very state of the one before."""
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0, "chunk_size": 16}
    settings |= {"dtype": "bfloat16", "implementation": "triton"}
    run = functools.partial(cases.run, cases.raw(48), IDS[:, :48], None, **settings)
    whole = run()
    monkeypatch.setattr(plans, "LEAST_CHUNKS", 1)
    names = count_launches(monkeypatch)
    # For 4 programs a scan: pieces of time in turn, on 3 processors; two segments on 8,
    # after a pass that ran ahead to where the second one starts.
    programs = 4 * -(-cases.V // 64)
    for processors, launches in ((3, 4), (8, 2)):
        monkeypatch.setattr(plans, "PROCESSORS", processors * programs // 4)
        cases._compiled.cache_clear()
        names.clear()
        cut = run()
        assert names.count("scan_kernel") == names.count("reverse_kernel") == launches
        for name, value in whole.items():
            np.testing.assert_array_equal(cut[name], value, err_msg=name)
    cases._compiled.cache_clear()


def count_launches(monkeypatch):
    """Names of kernels as they are launched."""
    from pallas_kernels.kda.gpu import launch

    names, plain = [], launch.launch

    def counted(kernel, *args, **settings):
        names.append(kernel.fn.__name__)
        return plain(kernel, *args, **settings)

    monkeypatch.setattr(launch, "launch", counted)
    return names


def test_last_tokens_of_a_row_as_long_as_memory_allows():
    """On a card: offsets beyond 2^31 elements, and grids of 262,500 programs."""
    time, heads, width = (1_050_000, 16, 128) if ON_GPU else (150, 1, 16)
    start = (time - (6_400 if ON_GPU else 60)) // 64 * 64
    names, shape = ("q", "k", "v", "g"), (1, time, heads, width)
    keys = jax.random.split(jax.random.key(0), len(names) + 1)
    x = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for name, key in zip(names, keys, strict=False)
    }
    x["beta"] = jax.random.normal(keys[-1], shape[:3], jnp.bfloat16)
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0, "implementation": "triton"}
    settings |= {"A_log": jnp.zeros(heads), "dt_bias": jnp.zeros(heads * width)}

    @functools.partial(jax.jit, static_argnames="length")
    def tail(x, state, length):
        def loss(x):
            o, last = kda(
                *(x[name] for name in (*names, "beta")),
                **settings,
                initial_state=state,
                output_final_state=True,
            )
            o = o[:, -length:].astype(jnp.float32)
            return jnp.sum(o**2), (o, last)

        (_, out), dx = jax.value_and_grad(loss, has_aux=True)(x)
        return out, jax.tree.map(lambda dy: dy[:, -length:], dx)

    state = jnp.zeros((1, heads, width, width))
    whole = tail(x, state, time - start)
    before = {name: y[:, :start] for name, y in x.items()}
    (_, state), _ = tail(before, state, 1)
    alone = tail({name: y[:, start:] for name, y in x.items()}, state, time - start)
    for got, wanted in zip(*map(jax.tree.leaves, (whole, alone)), strict=True):
        got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        # Only states at the borders of segments may differ, and those are forgotten.
        assert error < 1e-6, error


def test_padding_is_inert():
    """Not even NaN and infinity in padding change anything."""
    x = cases.raw(TIME)
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0, "dtype": "float32"}
    settings["implementation"] = "triton"
    padding = IDS == 0
    clean = cases.run(x, IDS, cases.cotangents(TIME), **settings)
    assert np.all(clean["o"][padding] == 0)
    do, dstate = cases.cotangents(TIME)
    dirty = {name: value.copy() for name, value in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        dirty[name][padding] = np.nan if name in "qvg" else np.inf
    do[padding] = np.nan
    got = cases.run(dirty, IDS, (do, dstate), **settings)
    for name, value in clean.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_no_gradient_crosses_a_border():
    do, dstate = cases.cotangents(TIME)
    chosen = np.array([IDS[0] == 3, IDS[1] == 2])
    out = do * chosen[..., None, None], 0 * dstate
    settings = {"lower_bound": -5.0, "dtype": "float32", "implementation": "triton"}
    got = cases.run(cases.prepared("random", TIME), IDS, out, **settings)
    assert np.all(got["dinitial_state"] == 0)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.all(got[name][~chosen] == 0), name
        assert np.any(got[name][chosen] != 0), name


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_outputs_ignore_the_future_to_the_last_bit(lower_bound):
    x = cases.prepared("random", 70)
    settings = {"dtype": "bfloat16", "gradients": False, "implementation": "triton"}
    settings["lower_bound"] = lower_bound
    before = cases.run(x, **settings)["o"]
    for time in (1, 33, 64):
        changed = {name: value.copy() for name, value in x.items()}
        changed["v"][:, time:] *= -1e3
        changed["k"][:, time:] = changed["k"][:, time:][:, ::-1]
        changed["g"][:, time:] = -5.0
        changed["beta"][:, time:] = 1.0
        after = cases.run(changed, **settings)["o"]
        np.testing.assert_array_equal(after[:, :time], before[:, :time])


def test_tiny_cotangents_are_as_exact():
    """Gradients are linear in them; a power of two changes no other bit."""
    do, dstate = cases.cotangents(70)
    settings = {"dtype": "bfloat16", "lower_bound": -5.0, "implementation": "triton"}
    x, tiny = cases.prepared("steps", 70), 2.0**-40
    expected = cases.run(x, None, (do, dstate), **settings)
    got = cases.run(x, None, (tiny * do, tiny * dstate), **settings)
    for name in expected:
        if name.startswith("d"):
            np.testing.assert_array_equal(got[name], tiny * expected[name], name)


def test_row_continues_in_the_next_call():
    """Two calls with the state handed over equal one; the first state is None."""
    x = cases.prepared("random", 70)
    settings = {"dtype": "float32", "gradients": False, "implementation": "triton"}
    settings["lower_bound"] = -5.0
    del x["initial_state"]
    whole = cases.run(x, **settings)
    cut = np.s_[:1], np.s_[1:]
    parts = [{n: a[:, part] for n, a in x.items()} for part in cut]
    first = cases.run(parts[0], **settings)
    second = cases.run({**parts[1], "initial_state": first["state"]}, **settings)
    o = np.concatenate([first["o"], second["o"]], axis=1)
    cases.assert_close({"o": o, "state": second["state"]}, whole, 1e-5)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has only one order to add in")
def test_two_runs_are_equal_to_the_last_bit():
    settings = {"dtype": "bfloat16", "lower_bound": -5.0, "implementation": "triton"}
    first, second = (cases.run(cases.prepared("random", 70), **settings) for _ in "ab")
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def token():
    x = {n: jnp.asarray(a, jnp.float32) for n, a in cases.raw(1).items()}
    state = x.pop("initial_state")
    return {n: a[:, 0] if a.ndim > 2 else a for n, a in x.items()}, state


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_single_step(lower_bound):
    x, state = token()
    settings = {**cases.IN_KERNEL, "lower_bound": lower_bound}

    def run(name, x, state):
        return kda_step(**x, state=state, implementation=name, **settings)

    got, expected = (run(name, x, state) for name in ("triton", "xla"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    gradients = [
        jax.grad(lambda x, name=name: run(name, x, state)[0].sum())(x)
        for name in ("triton", "xla")
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_step_from_bfloat16_rounds_nothing_on_its_way_to_the_state():
    """A write strength or decay rounded to bfloat16 would drift with every token."""
    x, state = token()
    x = {n: a.astype(jnp.bfloat16) if a.ndim > 1 else a for n, a in x.items()}
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0}
    _, got = kda_step(**x, state=state, implementation="triton", **settings)
    wide = {n: a.astype(jnp.float32) for n, a in x.items()}
    _, expected = kda_step(**wide, state=state, implementation="xla", **settings)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_long_document_and_documents_of_one_token():
    ids = np.repeat([[1, 2, 3, 4, 5], [1, 0, 2, 3, 4]], [66, 1, 1, 1, 1], axis=1)
    x = cases.prepared("random", ids.shape[1])
    x["initial_state"] = 0 * x["initial_state"]
    compare(x, ids, lower_bound=-5.0)


def float_inputs(time=20):
    x = {n: jnp.asarray(a, jnp.float32) for n, a in cases.raw(time).items()}
    del x["initial_state"]
    return x


def loss(x, residuals="all"):
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0, "implementation": "triton"}
    o, state = kda(**x, output_final_state=True, residuals=residuals, **settings)
    return jnp.sum(jnp.sin(o)) + jnp.sum(state)


def assert_same(got, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_vmap_and_checkpoint():
    x = float_inputs()
    plain = jax.grad(loss)(x)
    policy = jax.checkpoint_policies.save_only_these_names
    for names in [(), ("kda_states", "kda_matrices")]:
        again = jax.grad(jax.checkpoint(loss, policy=policy(*names)))(x)
        assert_same(again, plain)
    for residuals in ("states", "none"):
        assert_same(jax.grad(functools.partial(loss, residuals=residuals))(x), plain)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), x)
    both = jax.vmap(jax.grad(loss))(two)
    assert_same(jax.tree.map(lambda a: a[1], both), plain)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_shard_map():
    x = float_inputs()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = {name: P("data") for name in cases.INPUTS[:5]}
    spec |= {"A_log": P(), "dt_bias": P()}
    shards = jax.shard_map(
        lambda x: loss(x)[None], mesh=mesh, in_specs=(spec,), out_specs=P("data")
    )
    got = jax.jit(jax.grad(lambda x: shards(x).sum()))(x)
    assert_same(got, jax.grad(loss)(x))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("form", ["plain", "packed", "segments"])
def test_time_split_over_ranks(form, monkeypatch):
    """Documents go on and end at the border, 45; states come in and go out."""
    if form == "segments":  # of each rank's piece, side by side
        monkeypatch.setattr(plans, "LEAST_CHUNKS", 1)
        monkeypatch.setattr(plans, "PROCESSORS", 1000)
    x = {n: jnp.asarray(a, jnp.float32) for n, a in cases.raw(TIME).items()}
    ids = None if form == "plain" else np.where(IDS[:, ::-1] == 3, 1, IDS[:, ::-1])
    same = dict.fromkeys(("A_log", "dt_bias", "initial_state"), P())
    split = P(None, "context")
    specs = {**dict.fromkeys(cases.INPUTS[:5], split), **same}, split
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0, "output_final_state": True}
    settings["chunk_size"] = 16

    def single(x, ids):
        return kda(**x, segment_ids=ids, implementation="xla", **settings)

    def piece(x, ids):
        more = {"axis": "context", "implementation": "triton", **settings}
        return context_kda(**x, segment_ids=ids, **more)

    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    outputs = split, P()
    ranks = jax.shard_map(piece, mesh=mesh, in_specs=specs, out_specs=outputs)

    @functools.partial(cases.jit, static_argnums=0)
    def everything(call, x, ids, out):
        results, pull = jax.vjp(lambda x: call(x, ids), x)
        return results, pull(out)[0]

    out = tuple(np.float32(a) for a in cases.cotangents(TIME))
    got, expected = (everything(call, x, ids, out) for call in (ranks, single))
    errors = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), got, expected
    )
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


def test_only_triton_exchanges_states():
    with pytest.raises(ValueError, match="axis='context': 'xla' does not"):
        kda(**float_inputs(), axis="context", implementation="xla", **cases.IN_KERNEL)


def test_says_why_it_cannot_run():
    assert choose_implementation(None, "cpu")[1].endswith("NVIDIA GPU, and this is cpu")
    x = {n: a[..., :24] if n in "qkg" else a for n, a in float_inputs().items()}
    del x["A_log"], x["dt_bias"]
    with pytest.raises(ValueError, match="K=24, not one of"):
        kda(**x, implementation="triton")
