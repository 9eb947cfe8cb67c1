"""The TPU kernels against the recurrence in float64: values and all gradients.

Pallas's interpreter plays the TPU: it fills what nobody has written with NaN and looks
for races. Tests that can share a program do, because compiling is what they cost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import choose_implementation, kda, kda_step
from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.tpu import heads, launch
from tests.pallas_kernels import kda_cases as cases

REPEATING = ("near duplicates", "identical keys")
# Documents that start and end inside chunks, padding before, between and after them.
LENGTHS = [20, 5, 50, 15]
IDS = np.array([np.repeat(ids, LENGTHS) for ids in ([1, 0, 3, 4], [0, 5, 5, 2])])
TIME = IDS.shape[1]
PRODUCTION = {**cases.IN_KERNEL, "lower_bound": -5.0, "scale": 0.3}

compare = functools.partial(cases.compare, "mosaic_tpu")
run = functools.partial(cases.run, implementation="mosaic_tpu")


@pytest.fixture(autouse=True, scope="module")
def sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "K", 16)
        patch.setattr(cases, "V", 32)
        yield


@pytest.fixture(autouse=True)
def no_races():
    interpret_pallas_call.races = None
    yield
    found = interpret_pallas_call.races
    assert found is None or not found.races_found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_production_settings_packed(dtype):
    compare(cases.raw(TIME), IDS, dtype, **PRODUCTION)


def test_unbounded_gate_packed():
    settings = {**PRODUCTION, "lower_bound": None}
    compare(cases.raw(TIME), IDS, "bfloat16", **settings)


@pytest.mark.parametrize(
    "kind", ["unbounded", "floor", *REPEATING, "beta 0 or 1", "beta up to 2"]
)
def test_hard_inputs(kind):
    compare(cases.prepared(kind, 70))


@pytest.mark.parametrize("kind", ["floor", "steps", "beta 0 or 1", *REPEATING])
def test_hard_inputs_in_bfloat16(kind):
    tolerance = 1.5e-2 if kind in REPEATING else None
    compare(cases.prepared(kind, 70), None, "bfloat16", tolerance, lower_bound=-5.0)


def test_short_chunks_and_a_last_one_of_one_token():
    x = cases.prepared("random", 17)
    compare(x, None, "bfloat16", lower_bound=-5.0, chunk_size=16)


@pytest.mark.slow
def test_long_chunks():
    settings = {**PRODUCTION, "chunk_size": 128}
    compare(cases.raw(TIME), IDS, "bfloat16", **settings)


def test_padding_is_inert():
    """Not even NaN and infinity in padding change anything."""
    x, padding = cases.raw(TIME), IDS == 0
    do, dstate = cases.cotangents(TIME)
    clean = run(x, IDS, (do, dstate), "float32", **PRODUCTION)
    assert np.all(clean["o"][padding] == 0)
    dirty = {name: value.copy() for name, value in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        dirty[name][padding] = np.nan if name in "qvg" else np.inf
    do[padding] = np.nan
    got = run(dirty, IDS, (do, dstate), "float32", **PRODUCTION)
    for name, value in clean.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_no_gradient_crosses_a_border():
    do, dstate = cases.cotangents(TIME)
    chosen = np.array([IDS[0] == 3, IDS[1] == 2])
    out = do * chosen[..., None, None], 0 * dstate
    got = run(cases.raw(TIME), IDS, out, "float32", **PRODUCTION)
    assert np.all(got["dinitial_state"] == 0)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.all(got[name][~chosen] == 0), name
        assert np.any(got[name][chosen] != 0), name


def test_outputs_ignore_the_future_to_the_last_bit():
    x = cases.prepared("random", 70)
    before = run(x, None, None, "bfloat16", lower_bound=-5.0)["o"]
    for time in (1, 33, 64):
        changed = {name: value.copy() for name, value in x.items()}
        changed["v"][:, time:] *= -1e3
        changed["k"][:, time:] = changed["k"][:, time:][:, ::-1]
        changed["g"][:, time:] = -5.0
        changed["beta"][:, time:] = 1.0
        after = run(changed, None, None, "bfloat16", lower_bound=-5.0)["o"]
        np.testing.assert_array_equal(after[:, :time], before[:, :time])


def test_single_step():
    x = {n: jnp.asarray(a, jnp.float32) for n, a in cases.raw(1).items()}
    state = x.pop("initial_state")
    x = {n: a[:, 0] if a.ndim > 2 else a for n, a in x.items()}
    settings = {**cases.IN_KERNEL, "lower_bound": -5.0}

    def step(name, x, state):
        return kda_step(**x, state=state, implementation=name, **settings)

    got, expected = (step(name, x, state) for name in ("mosaic_tpu", "xla"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_heads_come_in_pairs():
    """How bfloat16 heads are told apart, which the TPU's interpreter does not know."""
    x = jnp.asarray(cases.draw(0, 1, 16, 8, 128), jnp.bfloat16)

    def kernel(x_ref, heads_ref, y_ref):
        found = heads.load(x_ref, range(8), words=True)
        heads_ref[...] = jnp.stack(found)
        heads.store(y_ref, [2.0 * rows for rows in found], words=True)

    shapes = jax.ShapeDtypeStruct((8, 16, 128), jnp.float32), x
    found, doubled = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x)
    np.testing.assert_array_equal(found, jnp.swapaxes(x[0], 0, 1))
    np.testing.assert_array_equal(doubled, 2 * x)


@pytest.mark.slow
def test_shard_map_vmap_and_checkpoint(monkeypatch):
    # The TPU's interpreter has effects, which `jax.checkpoint` refuses.
    monkeypatch.setattr(launch, "interpreter", lambda: True)
    x = {n: jnp.asarray(a, jnp.float32) for n, a in cases.raw(20).items()}
    del x["initial_state"]

    def loss(x, implementation):
        settings = {**PRODUCTION, "chunk_size": 16, "output_final_state": True}
        o, state = kda(**x, implementation=implementation, **settings)
        return jnp.sum(jnp.sin(o)) + jnp.sum(state)

    policy = jax.checkpoint_policies.save_only_these_names("kda_states", "kda_matrices")
    remat = jax.checkpoint(lambda x: loss(x, "mosaic_tpu"), policy=policy)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = {name: P(None, "data") for name in cases.INPUTS[:5]}
    spec |= {"A_log": P(), "dt_bias": P()}
    shards = jax.shard_map(
        lambda x: jax.vmap(remat)(x)[None],
        mesh=mesh,
        in_specs=(spec,),
        out_specs=P("data"),
        check_vma=False,
    )
    two = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), x)
    got = cases.jit(jax.grad(lambda x: shards(x).sum()))(two)
    plain = cases.jit(jax.grad(lambda x: loss(x, "xla")))
    for row in range(2):
        expected = plain(jax.tree.map(lambda a, row=row: a[row], two))
        for name, value in expected.items():
            np.testing.assert_allclose(
                got[name][row], value, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_chosen_for_tpus_and_says_why_not():
    assert choose_implementation(None, "tpu") == (
        "mosaic_tpu",
        "fused kernels for this TPU",
    )
    with pytest.raises(ValueError, match="needs a TPU, and this is gpu; use 'xla'"):
        choose_implementation("mosaic_tpu", "gpu")
    x = {n: jnp.zeros((1, 2, 20, 64)) for n in "qkvg"} | {"beta": jnp.zeros((1, 2, 20))}
    with pytest.raises(ValueError, match=r"20 heads, and above 16 .* multiple of 8"):
        kda(**x, implementation="mosaic_tpu")


def test_blocks_that_do_not_fit_the_chip_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "on_chip_limit", lambda: 16 * 2**20)
    wide = jnp.zeros((1, 128, 8, 256), jnp.bfloat16)
    inputs = Inputs(wide, wide, wide, wide, wide[..., 0], None, None)
    options = Options(1.0, -5.0, False, False, False, False, chunk_size=128)
    sizes = launch.make_sizes(inputs, False, options)
    with pytest.raises(ValueError, match=r"a kernel may take 16 .* smaller chunk_size"):
        launch.check_on_chip_memory(sizes, [sizes.tokens(256)] * 8)
    small = launch.make_sizes(inputs, False, options._replace(chunk_size=16))
    launch.check_on_chip_memory(small, [small.tokens(256)] * 8)
