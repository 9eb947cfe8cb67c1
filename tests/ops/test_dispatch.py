"""Experts spread over 8 devices against dense ones on one, values and gradients."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kimi_jax.ops import balancing
from kimi_jax.ops.dispatch import Options, capacity, choose, dispatch, receive_rows
from kimi_jax.ops.exchange import Trip, choose_exchange, exchange
from kimi_jax.ops.experts import dense_experts
from kimi_jax.ops.routing import route_top_k

L, F, A, E, N = 4, 6, 3, 16, 5  # N tokens on each device


def activation(gate, up):
    return jax.nn.silu(gate) * jnp.tanh(up)


def mesh(devices, tensor=1):
    shape, names = (devices, tensor), ("expert", "tensor")
    grid = np.array(jax.devices()[: devices * tensor]).reshape(shape)
    return jax.sharding.Mesh(grid, names, axis_types=(AxisType.Auto,) * 2)


def make(devices, *, tokens=N, route="spread", seed=0):
    rng = np.random.default_rng(seed)
    shape = (devices * tokens, A)
    experts_NA = rng.integers(0, E, shape)
    if route == "padding":
        experts_NA[rng.random(shape) < 0.4] = E
    elif route == "one_expert_has_all":
        experts_NA[:] = 9
    elif route == "few_experts":
        experts_NA = rng.choice([1, 14], shape)
    shapes = [(devices * tokens, L), shape, (E, L, F), (E, L, F), (E, F, L)]
    x, weights, *matrices = (jnp.asarray(rng.normal(size=s)) for s in shapes)
    return x, jnp.asarray(experts_NA, jnp.int32), weights, *matrices


def spread_out(options, mesh):
    """dispatch on the mesh: global arrays -> (y_NL, dropped on each device)."""

    def local(*args):
        got = dispatch(*args, activation, options)
        return got.y_NL, got.dropped[None]

    tensor = options.tensor_axis
    wide, narrow = P("expert", None, tensor), P("expert", tensor)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("expert"),) * 3 + (wide, wide, narrow),
        out_specs=(P("expert"), P("expert")),
    )


@functools.partial(jax.jit, static_argnames=("options", "devices", "tensor"))
def run(args, options=None, devices=8, tensor=1):
    """((y_NL, dropped), gradients of everything but the experts' numbers)."""
    x, experts_NA, *rest = args
    if options is None:

        def function(*args):
            y_NL = dense_experts(*args, activation).y_NL
            return y_NL, jnp.zeros(devices, jnp.int32)
    else:
        function = spread_out(options, mesh(devices, tensor))

    def loss(floats):
        y_NL, dropped = function(floats[0], experts_NA, *floats[1:])
        cotangent_NL = 2 + jnp.cos(jnp.arange(y_NL.size)).reshape(y_NL.shape)
        return jnp.sum(y_NL * cotangent_NL), (y_NL, dropped)

    gradients, aux = jax.grad(loss, has_aux=True)((x, *rest))
    return aux, gradients


def assert_same(got, expected):
    chex.assert_trees_all_close(got, expected, rtol=1e-10, atol=1e-12)


AMPLE = {
    "capacity": Options("capacity", "expert", None, 8.0, "blocked"),
    "padded": Options("capacity", "expert", None, 16.0, "padded"),
    "ragged": Options("ragged", "expert", None, 8.0, "blocked"),
}
ROUTES = ("spread", "padding", "one_expert_has_all", "few_experts")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", AMPLE)
def test_enough_room_equals_dense(method, route):
    with jax.enable_x64(True):
        args = make(8, route=route)
        (y_NL, dropped), gradients = run(args, AMPLE[method])
        assert_same(((y_NL, dropped), gradients), run(args))


def test_tensor_axis_changes_nothing():
    with jax.enable_x64(True):
        args = make(4, route="padding")
        options = AMPLE["capacity"]._replace(tensor_axis="tensor")
        got = run(args, options, devices=4, tensor=2)
        assert_same(got, run(args, devices=4))


def test_tokens_may_be_split_over_more_axes_than_experts():
    options = AMPLE["padded"]
    names = ("data", "expert")
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), names)

    def local(*args):
        got = dispatch(*args, activation, options)
        return got.y_NL, jax.lax.psum(got.dropped, names)

    function = jax.shard_map(
        local,
        mesh=grid,
        in_specs=(P(names),) * 3 + (P("expert"),) * 3,
        out_specs=(P(names), P()),
    )

    def loss(x, experts_NA, *rest):
        y_NL, dropped = function(x, experts_NA, *rest)
        return jnp.sum(jnp.sin(y_NL)), (y_NL, dropped)

    def expected_loss(*args):
        y_NL = dense_experts(*args, activation).y_NL
        return jnp.sum(jnp.sin(y_NL)), (y_NL, 0)

    with jax.enable_x64(True):
        args = make(8, route="padding")
        got, expected = (
            jax.jit(jax.grad(f, argnums=(0, 2, 3, 4, 5), has_aux=True))(*args)
            for f in (loss, expected_loss)
        )
    assert_same(got, expected)


def test_one_token_on_each_device():
    with jax.enable_x64(True):
        args = make(8, tokens=1, route="padding")
        assert_same(run(args, AMPLE["ragged"]), run(args))


def test_one_device_of_experts_drops_nothing_and_takes_a_tensor_axis():
    options = Options("capacity", "expert", "tensor", 1.0, "ragged")
    with jax.enable_x64(True):
        args = make(1, tokens=10, route="one_expert_has_all")
        assert_same(run(args, options, 1, 2), run(args, devices=1))


def dropped_by_hand(experts_NA, method, factor, devices):
    """bool_NA of the slots that find no room, by walking over them one by one."""
    tokens, here = experts_NA.shape[0] // devices, E // devices
    room_XX = np.full((devices, devices), capacity(tokens * A, devices, factor))
    room_X = np.full(devices, receive_rows(tokens * A, devices, factor))
    room_E = np.full(E, np.ceil(factor * tokens * A / here))
    dropped_NA = np.zeros(experts_NA.shape, bool)
    for source in range(devices):
        room = room_X if method == "ragged" else room_XX[source]
        for a in range(A):
            for n in range(source * tokens, (source + 1) * tokens):
                expert = experts_NA[n, a]
                if expert == E:
                    continue
                dropped_NA[n, a] = room[expert // here] == 0
                room[expert // here] -= not dropped_NA[n, a]
                if method == "padded" and not dropped_NA[n, a]:
                    dropped_NA[n, a] = room_E[expert] == 0
                    room_E[expert] -= not dropped_NA[n, a]
    return dropped_NA


@pytest.mark.parametrize("method", AMPLE)
def test_the_expected_slots_are_dropped(method):
    # Room on the wire for all that 'padded' is to drop on arrival.
    factor = 3.0 if method == "padded" else 1.25
    options = AMPLE[method]._replace(capacity_factor=factor)
    with jax.enable_x64(True):
        x, experts_NA, *rest = args = make(8, route="few_experts")
        dropped_NA = dropped_by_hand(np.asarray(experts_NA), method, factor, 8)
        (y_NL, dropped), gradients = run(args, options)
        kept_NA = jnp.where(dropped_NA, E, experts_NA)
        (expected_NL, _), expected = run((x, kept_NA, *rest))
    assert_same((y_NL, gradients), (expected_NL, expected))
    assert dropped_NA.any() and not np.asarray(gradients[1])[dropped_NA].any()
    assert dropped.dtype == np.int32 and np.sum(dropped) == dropped_NA.sum()
    if method == "padded":
        on_wire_NA = dropped_by_hand(np.asarray(experts_NA), "capacity", factor, 8)
        assert on_wire_NA.sum() < dropped_NA.sum()
    else:
        by_device = dropped_NA.reshape(8, -1).sum(axis=1)
        np.testing.assert_array_equal(dropped, by_device)


def test_last_choices_are_dropped_first():
    dropped_NA = dropped_by_hand(np.full((8 * 8, A), 9), "capacity", 3.0, 8)
    assert not dropped_NA[:, 0].any() and dropped_NA[:, 1:].any()
    assert capacity(24, 8, 3.0) == 9  # 8 first choices and 1 second one


def sent(text):
    """(dtype, elements) of each array that an all-to-all of compiled HLO receives."""
    lines = re.findall(r"= (.*?) all-to-all\(", text)
    arrays = [
        array for line in lines for array in re.findall(r"(\w+)\[([\d,]+)]", line)
    ]
    return [
        (kind, np.prod([int(n) for n in shape.split(",")])) for kind, shape in arrays
    ]


def test_bytes_on_the_wire():
    # 15 slots for 8 devices: a factor of 1.6 gives exactly 3 rows to each.
    options = AMPLE["capacity"]._replace(capacity_factor=1.6)
    text = run.lower(make(8), options).compile().as_text()
    floats = sum(size for kind, size in sent(text) if kind == "f32")
    # There and back, forward and again backward.
    assert floats / N == pytest.approx(2 * (2 * A * L * 1.6), abs=1e-9)
    # One number with each row that goes there.
    numbers = sum(size for kind, size in sent(text) if kind == "s32")
    assert numbers / N == pytest.approx(A * 1.6, abs=1e-9)
    assert "all-gather(" not in text and "all-reduce(" not in text
    # Rows move by gathers: none is added into a buffer.
    assert not re.search(r"f32\[\d+,4]\S* scatter\(", text)


def test_tensor_axis_adds_up_one_row_for_each_token():
    options = AMPLE["capacity"]._replace(tensor_axis="tensor")
    text = run.lower(make(4), options, 4, 2).compile().as_text()
    reduced = re.findall(r"= (.*?) all-reduce\(", text)
    sizes = re.findall(r"f32\[([\d,]+)]", " ".join(reduced))
    assert sorted(sizes) == [f"{N},{A}", f"{N},{L}", f"{N},{L}"]  # y, dx, dweights


def test_ragged_all_to_all_is_used_where_there_is_one():
    options = AMPLE["ragged"]._replace(platform="tpu", implementation=None)
    function = jax.jit(spread_out(options, mesh(8)))
    text = function.lower(*make(8)).as_text()
    assert text.count("custom_call @ragged_all_to_all") == 3
    assert "all_to_all" not in text.replace("ragged_all_to_all", "")
    assert choose_exchange(None, "gpu")[0] == "ragged_all_to_all"
    name, reason = choose_exchange(None, "cpu")
    assert name == "all_gather" and "XLA:CPU" in reason
    with pytest.raises(ValueError, match=r"'mail'.*ragged_all_to_all, all_gather"):
        choose_exchange("mail", "cpu")


def test_padded_is_chosen_where_slots_may_be_dropped_and_experts_are_full():
    gpu = Options("capacity", "expert", platform="gpu")
    assert choose(gpu, 8192 * 16, 14)[0] == "padded"
    assert choose(gpu, 512, 14)[0] == "blocked"
    assert choose(gpu._replace(method="ragged"), 8192 * 16, 14)[0] == "blocked"
    assert choose(gpu._replace(platform="cpu"), 8192 * 16, 14)[0] == "blocked"
    assert choose(gpu._replace(platform="tpu"), 8192 * 16, 14)[0] == "ragged"
    with pytest.raises(ValueError, match="'padded' drops slots"):
        choose(Options("local", implementation="padded"), 512, 14)


def test_exchange_and_its_reverse():
    # Device s sends s + 1 rows to each of 2 devices, out of buffers of 5 rows.
    size_SD = np.array([[1, 1], [2, 2]], np.int32)
    trip = Trip(np.array([[0, 1], [0, 2]]), np.array([[0, 0], [1, 1]]), size_SD)
    trip = jax.tree.map(lambda a: jnp.asarray(a, jnp.int32), trip)

    def there_and_back(x_PL):
        got = exchange(x_PL, trip, 5, 3, "expert", "all_gather")
        return got, exchange(got, trip.reversed(), 3, 5, "expert", "all_gather")

    x_PL = jnp.arange(1.0, 11)[:, None]
    got, back = jax.jit(
        jax.shard_map(
            there_and_back, mesh=mesh(2), in_specs=P("expert"), out_specs=P("expert")
        )
    )(x_PL)
    np.testing.assert_array_equal(got[:, 0], [1, 6, 7, 2, 8, 9])
    np.testing.assert_array_equal(back[:, 0], [1, 2, 0, 0, 0, 6, 7, 8, 9, 0])


def test_balanced_routing_drops_nothing_at_the_start():
    # Random router and tokens; 16 devices of 8 experts and 1,024 tokens each.
    devices, tokens, experts, active, D = 16, 1024, 128, 16, 64
    rng = np.random.default_rng(0)
    w_DE = rng.uniform(-(D**-0.5), D**-0.5, (D, experts))
    shift_D = 0.3 * rng.normal(size=D)  # what all tokens share makes loads uneven

    def route(bias_E):
        x_ND = rng.normal(size=(devices * tokens, D)) + shift_D
        scores_NE = jnp.asarray(1 / (1 + np.exp(-x_ND @ w_DE)), jnp.float32)
        return scores_NE, route_top_k(scores_NE, bias_E, active=active, scale=1.0)

    def fullest(routing):
        """Load over even load: of the fullest pair of devices, and fullest expert."""
        experts_NA = np.asarray(routing.experts_NA)
        to = experts_NA.reshape(devices, -1) // (experts // devices)
        pairs = np.stack([np.bincount(row, minlength=devices) for row in to])
        loads = np.bincount(experts_NA.reshape(-1), minlength=experts)
        return pairs.max() / pairs.mean(), loads.max() / loads.mean()

    bias_E = jnp.zeros(experts)
    scores_NE, routing = route(bias_E)
    assert min(fullest(routing)) > 1.25
    observed = balancing.observe("quantile", routing, scores_NE, bias_E)
    bias_E = balancing.update("quantile", bias_E, observed, active=active)
    assert max(fullest(route(bias_E)[1])) < Options().capacity_factor == 1.25


def test_capacity_counts_rows():
    assert capacity(16, 8, 1.25) == 3 and capacity(40, 8, 1.1) == 6
    assert capacity(10, 1, 1.1) == 10  # not more than there are
    assert capacity(3, 8, 1.0) == 1 and receive_rows(3, 8, 100.0) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options("post"), r"'post'.*local, capacity, ragged"),
        (Options("local", "expert"), r"8 devices of axis 'expert'.*'capacity'"),
        (Options("capacity", "expert", capacity_factor=0.5), "at least 1"),
        (Options("ragged", "expert", capacity_factor=np.nan), "at least 1"),
        (Options("ragged", "expert", exchange="mail"), "'mail'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(spread_out(options, mesh(8)), *make(8))
