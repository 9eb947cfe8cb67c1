"""One token: the state is read, changed and written once. All in float32, no products.

A program takes a block of heads of a few batch rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.gates import Inputs, Options, write_strength
from pallas_kernels.kda.tpu.launch import (
    HEADS,
    compiler_params,
    gate_parameters,
    interpreter,
)
from pallas_kernels.kda.tpu.rows import Raw, prepare

Array = jax.Array

# Bytes of states that a program holds at a time; both directions are buffered twice.
STATE_BYTES = 2**21


def step_kernel(options: Options, q, k, g, v, beta, gate, state, o, out) -> None:
    """Blocks [BB,HB,K], v and o [BB,HB,V], beta [BB,HB,1], states [BB,HB,K,V]."""
    rows, heads = state.shape[:2]
    strength = write_strength(beta[...].astype(jnp.float32), options)
    for b in range(rows):
        q_HK, k_HK, g_HK = (x[b].astype(jnp.float32) for x in (q, k, g))
        raw = Raw(q_HK, k_HK, g_HK, slope=gate[0], bias=gate[1])
        # Tokens as columns, to scale rows of the state.
        columns = [jnp.transpose(x) for x in prepare(options, raw)]
        values = v[b].astype(jnp.float32)
        for h in range(heads):
            q_K1, k_K1, g_K1 = (x[:, h : h + 1] for x in columns)
            s = jnp.exp(g_K1) * state[b, h]
            recalled = jnp.sum(k_K1 * s, axis=0, keepdims=True)
            s += k_K1 * (strength[b, h : h + 1] * (values[h : h + 1] - recalled))
            out[b, h] = s
            read = jnp.sum(q_K1 * s, axis=0, keepdims=True)
            o[b, h : h + 1] = read.astype(o.dtype)


def step(inputs: Inputs, state: Array, options: Options) -> tuple[Array, Array]:
    """Returns o [B,HV,V] and the new state; q and k already have HV heads."""
    B, HV, K, V = state.shape
    HB = HEADS if HV % HEADS == 0 else HV
    most = max(1, STATE_BYTES // (4 * HB * K * V))
    BB = max(b for b in range(1, min(most, B) + 1) if B % b == 0)

    def rows(*width: int) -> pl.BlockSpec:
        return pl.BlockSpec((BB, HB, *width), lambda b, h: (b, h) + (0,) * len(width))

    return pl.pallas_call(
        partial(step_kernel, options),
        grid=(B // BB, HV // HB),
        in_specs=[
            *(rows(K) for _ in "qkg"),
            rows(V),
            rows(1),
            pl.BlockSpec((2, HB, K), lambda b, h: (0, h, 0)),
            rows(K, V),
        ],
        out_specs=[rows(V), rows(K, V)],
        out_shape=[
            jax.ShapeDtypeStruct((B, HV, V), inputs.v.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={6: 1},
        compiler_params=compiler_params("parallel", "parallel"),
        interpret=interpreter(),
        name="kda_step_kernel",
    )(
        *(inputs.q, inputs.k, inputs.g, inputs.v, inputs.beta[..., None]),
        gate_parameters(inputs, HV, K),
        state,
    )
