"""KDA under vmap, jax.checkpoint and sharding; and what it keeps for the backward."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import kda
from tests.pallas_kernels import kda_cases as cases

TIME, CHUNK = 48, 16
SETTINGS = {**cases.IN_KERNEL, "lower_bound": -5.0, "chunk_size": CHUNK}
IDS = np.repeat([[1, 2, 2], [3, 0, 3]], 16, axis=1).astype(np.int32)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def arguments(repeats=1):
    """Raw inputs in float32 without a state, every head repeated."""
    x = {name: jnp.asarray(a, jnp.float32) for name, a in cases.raw(TIME).items()}
    del x["initial_state"]
    head_axis = {"A_log": 0, "dt_bias": 0}
    return {n: jnp.repeat(a, repeats, axis=head_axis.get(n, 2)) for n, a in x.items()}


def apply(x, ids=None, **settings):
    tensors = [x[name] for name in cases.INPUTS[:5]]
    rest = {name: x[name] for name in cases.INPUTS[5:] if name in x}
    settings = {**SETTINGS, "output_final_state": True, **settings}
    return kda(*tensors, **rest, segment_ids=ids, **settings)


def loss(x, call=apply):
    """Linear in the outputs, so that its own gradient needs none of them."""
    return sum(jnp.vdot(jnp.cos(jnp.arange(y.size)), y.ravel()) for y in call(x))


@pytest.fixture(scope="module")
def gradient():
    return cases.jit(jax.grad(loss))


def test_vmap_equals_a_loop(gradient):
    x = arguments()
    two = jax.tree.map(lambda a: jnp.stack([a, a[..., ::-1]]), x)
    alone = [gradient(jax.tree.map(lambda a, i=i: a[i], two)) for i in (0, 1)]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *alone)
    got = cases.jit(jax.vmap(jax.grad(loss)))(two)
    chex.assert_trees_all_close(got, expected, **CLOSE)


@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "packed"])
def test_keeps_inputs_states_and_matrices_only(ids):
    x = arguments()
    state = jnp.zeros((cases.B, cases.HV, cases.K, cases.V))

    def backward(x, state):
        return jax.vjp(partial(apply, ids=ids), {**x, "initial_state": state})[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, x, state))
    chunks = (TIME // CHUNK, cases.B, cases.HV)
    states, matrix = (*chunks, cases.K, cases.V), (*chunks, CHUNK, CHUNK)
    runs = [] if ids is None else [ids.shape] * 3
    expected = [states, *[matrix] * 3, *(a.shape for a in x.values()), *runs]
    assert sorted(a.shape for a in kept if a.ndim) == sorted(expected)


@pytest.mark.parametrize("residuals", ["states", "none"])
def test_residuals_are_a_choice(residuals, gradient):
    x = arguments()
    call = partial(apply, residuals=residuals)
    got = cases.jit(jax.grad(partial(loss, call=call)))(x)
    chex.assert_trees_all_close(got, gradient(x), **CLOSE)

    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(call, x)[1], x))
    shapes, chunks = {a.shape for a in kept}, (TIME // CHUNK, cases.B, cases.HV)
    assert ((*chunks, cases.K, cases.V) in shapes) == (residuals == "states")
    assert (*chunks, CHUNK, CHUNK) not in shapes


@pytest.mark.parametrize(
    ("names", "runs_forward_again"),
    [(("kda_states", "kda_matrices"), False), ((), True)],
)
def test_checkpoint_policies_see_the_names(names, runs_forward_again, gradient):
    x = arguments()
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    checkpointed = jax.grad(jax.checkpoint(loss, policy=policy))
    chex.assert_trees_all_close(cases.jit(checkpointed)(x), gradient(x), **CLOSE)
    # The forward pass has one scan over chunks, the backward pass another.
    text = str(jax.make_jaxpr(checkpointed)(x))
    assert text.count("scan[") == 2 + runs_forward_again


def test_sharded_batch_and_heads_need_no_communication():
    """Only the gradients of the shared parameters are summed over the batch axis."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = arguments(repeats=4)
    spec = {name: P("data", None, "model") for name in cases.INPUTS[:5]}
    spec |= {"A_log": P("model"), "dt_bias": P("model")}
    where = {name: NamedSharding(mesh, spec[name]) for name in x}
    function = jax.grad(partial(loss, call=partial(apply, ids=IDS)))
    sharded = cases.jit(function, in_shardings=(where,), out_shardings=where)
    text = sharded.lower(x).compile().as_text()
    for operation in ("all-gather", "all-to-all", "collective-permute"):
        assert f"{operation}(" not in text and f"{operation}-start(" not in text
    assert "all-reduce(" in text


def test_shard_map_with_a_default_state(gradient):
    """A state that is left out must vary over the mesh axes as the inputs do."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = arguments()
    spec = {name: P("data") for name in cases.INPUTS[:5]}
    spec |= {"A_log": P(), "dt_bias": P()}

    def sharded(**settings):
        call = partial(apply, **settings)
        call = jax.shard_map(call, mesh=mesh, in_specs=(spec,), out_specs=P("data"))
        return jax.grad(partial(loss, call=call))

    got, expected = jax.device_get((cases.jit(sharded())(x), gradient(x)))
    chex.assert_trees_all_close(got, expected, **CLOSE)
    jax.eval_shape(sharded(implementation="reference"), x)
