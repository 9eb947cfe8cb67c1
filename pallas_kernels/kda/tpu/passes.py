"""The forward and the backward pass: arrays in, arrays out."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.segments import Runs
from pallas_kernels.kda.tpu.backward import backward_kernel
from pallas_kernels.kda.tpu.forward import forward_kernel
from pallas_kernels.kda.tpu.launch import (
    Block,
    Sizes,
    gate_parameters,
    launch,
    make_sizes,
)

Array = jax.Array
Blocks = dict[str, tuple[Any, Block]]


def forward(
    inputs: Inputs, state: Array, runs: Runs | None, options: Options, save: bool
) -> dict[str, Array]:
    """Returns o and s_out, and with `save` states [B,chunks,HV,V,K] and a."""
    sizes = make_sizes(inputs, runs is not None, options)
    spec = sizes.spec
    blocks = _raw_blocks(sizes, inputs, runs, options)
    blocks["s_in"] = state, sizes.states()
    outputs = {
        "o": (_like(inputs.v), sizes.tokens(sizes.V)),
        "s_out": (_like(state), sizes.states()),
    }
    if save:
        lead = sizes.B, sizes.chunks
        outputs["states"] = (
            jax.ShapeDtypeStruct((*lead, sizes.HV, sizes.V, sizes.K), sizes.dtype),
            sizes.per_chunk(sizes.HB, sizes.V, sizes.K),
        )
        shape = *lead, sizes.HV // spec.G, spec.C, spec.R
        outputs["a"] = (
            jax.ShapeDtypeStruct(shape, sizes.dtype),
            sizes.per_chunk(sizes.HB // spec.G, spec.C, spec.R),
        )
    scratch = {"state": (sizes.HB, sizes.V, sizes.K)}
    return launch(forward_kernel, sizes, options, blocks, outputs, scratch)


def backward(
    inputs: Inputs,
    runs: Runs | None,
    states: Array,
    a: Array,
    do: Array,
    dstate: Array,
    options: Options,
) -> tuple[Inputs, Array]:
    """Gradients by the inputs and by the state before the first token."""
    sizes = make_sizes(inputs, runs is not None, options)
    spec, K, HB = sizes.spec, sizes.K, sizes.HB
    blocks = _raw_blocks(sizes, inputs, runs, options)
    blocks |= {
        "states": (states, sizes.per_chunk(HB, sizes.V, K)),
        "a": (a, sizes.per_chunk(HB // spec.G, spec.C, spec.R)),
        "do": (do, sizes.tokens(sizes.V)),
        "ds_in": (dstate, sizes.states()),
    }
    outputs = {f"d{name}": (_like(blocks[name][0]), blocks[name][1]) for name in "qkgv"}
    outputs["dbeta"] = _like(blocks["beta"][0]), blocks["beta"][1]
    outputs["ds_out"] = _like(dstate), sizes.states()
    if "gate" in blocks:
        shape = sizes.B, 2, sizes.HV, K
        outputs["dgate"] = (
            jax.ShapeDtypeStruct(shape, jnp.float32),
            Block((1, 2, HB, K), lambda b, h, t: (b, 0, h, 0)),
        )
    scratch = {"dstate": (HB, sizes.V, K)}
    made = launch(
        backward_kernel, sizes, options, blocks, outputs, scratch, reverse=True
    )
    return _to_inputs(sizes, inputs, made), made["ds_out"]


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _raw_blocks(
    sizes: Sizes, inputs: Inputs, runs: Runs | None, options: Options
) -> Blocks:
    spec, K = sizes.spec, sizes.K
    blocks: Blocks = {name: (getattr(inputs, name), sizes.tokens(K)) for name in "qkg"}
    blocks["v"] = inputs.v, sizes.tokens(sizes.V)
    beta = _by_chunk(sizes, inputs.beta.astype(jnp.float32))
    blocks["beta"] = jnp.swapaxes(beta, 2, 3), sizes.per_chunk(sizes.HB, spec.C)
    if options.use_gate_in_kernel:
        block = Block((2, sizes.HB, K), lambda b, h, t: (0, h, 0))
        blocks["gate"] = gate_parameters(inputs, sizes.HV, K), block
    if spec.packed:
        block = Block((1, 1, 1, spec.R), lambda b, h, t: (b, t, 0, 0))
        blocks["codes"] = _codes(sizes, runs), block
    return blocks


def _by_chunk(sizes: Sizes, x_BT: Array, mode: str = "constant") -> Array:
    """[B,T,...] -> [B,chunks,C,...]."""
    rest = [(0, 0)] * (x_BT.ndim - 2)
    x_BT = jnp.pad(x_BT, ((0, 0), (0, -sizes.T % sizes.spec.C), *rest), mode=mode)
    return x_BT.reshape(sizes.B, sizes.chunks, sizes.spec.C, *x_BT.shape[2:])


def _codes(sizes: Sizes, runs: Runs | None) -> Array:
    """Bits of each token for `stacks.make_masks`, once for each head of a stack."""
    if runs is None:
        real = jnp.ones((sizes.B, sizes.T), bool)
        run = jnp.zeros((sizes.B, sizes.T), jnp.int32)
    else:
        real, run = runs.real_BT, runs.run_BT
    real, run = _by_chunk(sizes, real), _by_chunk(sizes, run, "edge")
    leaving = run[:, :, -1:]
    entering = jnp.pad(leaving, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    bits = real + 2 * (run == entering) + 4 * (run == leaving)
    codes_BNC = (run << 3) | bits.astype(jnp.int32)
    return jnp.tile(codes_BNC, sizes.spec.G)[:, :, None]


def _to_inputs(sizes: Sizes, inputs: Inputs, made: dict[str, Array]) -> Inputs:
    dbeta = jnp.swapaxes(made["dbeta"], 2, 3).reshape(sizes.B, -1, sizes.HV)
    dbeta = dbeta[:, : sizes.T].astype(inputs.beta.dtype)
    dA_log = ddt_bias = None
    if inputs.A_log is not None:
        dslope = jnp.sum(made["dgate"][:, 0], axis=(0, 2))
        dA_log = dslope * jnp.exp(inputs.A_log.astype(jnp.float32))
        dA_log = dA_log.astype(inputs.A_log.dtype)
    if inputs.dt_bias is not None:
        ddt_bias = jnp.sum(made["dgate"][:, 1], axis=0).reshape(-1)
        ddt_bias = ddt_bias.astype(inputs.dt_bias.dtype)
    dq, dk, dg, dv = (made[f"d{name}"] for name in "qkgv")
    return Inputs(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)
