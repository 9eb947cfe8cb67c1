"""The backward kernel: one program a chunk and block of heads, last chunk first.

Everything but A and the states before the chunks is computed anew. The gradient by the
state stays in on-chip memory from the last chunk to the first.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.gates import Options, write_strength
from pallas_kernels.kda.tpu import chunk, heads
from pallas_kernels.kda.tpu.forward import load_state, store_state
from pallas_kernels.kda.tpu.rows import (
    make_rows,
    prepare,
    read,
    read_raw,
    read_states,
    unstack,
    write_states,
)
from pallas_kernels.kda.tpu.stacks import Spec, by_head, make_masks, select

Array = jax.Array
Refs = dict[str, Any]


def backward_kernel(
    refs: Refs, outputs: Refs, scratch: Refs, spec: Spec, options: Options
) -> None:
    """Gradients of one chunk by the raw inputs."""
    dstate = scratch["dstate"]
    load_state(dstate, refs["ds_in"])
    masks = make_masks(spec, refs["codes"][0, 0] if spec.packed else None)
    which = range(dstate.shape[0])
    raw = read_raw(refs, spec, masks, which)
    prepared, to_raw = jax.vjp(partial(prepare, options), raw)
    rows = make_rows(refs, spec, masks, which, prepared, options)
    drows, before = chunk.backward(
        spec,
        masks,
        rows,
        read_states(refs["states"].at[0, 0], spec),
        _block_diagonal(spec, masks, refs["a"][0, 0]),
        read(refs, spec, masks, which, "do"),
        read_states(dstate, spec),
    )
    write_states(dstate, spec, before)
    draw = to_raw((drows.q, drows.k, select(masks.real, drows.g)))[0]
    for name, dx in (*draw._asdict().items(), ("v", drows.v)):
        if f"d{name}" in outputs:
            heads.store(outputs[f"d{name}"], unstack(spec, dx), spec.words)
    if "dgate" in outputs:
        _add_gate(outputs["dgate"], spec, draw.slope, draw.bias)
    _store_strength(outputs["dbeta"], refs["beta"], spec, options, drows.b)
    store_state(outputs["ds_out"], dstate)


def _block_diagonal(spec: Spec, masks: Any, a_NCR: Array) -> Array:
    a_NRR = jnp.concatenate([a_NCR.astype(jnp.float32)] * spec.G, axis=1)
    return jnp.where(masks.i // spec.C == masks.j // spec.C, a_NRR, 0.0)


def _add_gate(target: Any, spec: Spec, dslope: Array, dbias: Array) -> None:
    """Sums over tokens, of all chunks so far; target [1,2,HB,K]."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        target[...] = jnp.zeros_like(target)

    for row, dx in enumerate((dslope, dbias)):
        sums = [jnp.sum(x, axis=0, keepdims=True) for x in unstack(spec, dx)]
        target[0, row] += jnp.concatenate(sums)


def _store_strength(
    target: Any, beta: Any, spec: Spec, options: Options, db: Array
) -> None:
    """Gradient by the raw beta, [1,1,HB,C], from columns [N,R,1]."""
    columns = unstack(spec, db)
    at = jax.lax.broadcasted_iota(jnp.int32, (spec.C, len(columns)), 1)
    db_CH = sum(jnp.where(at == h, x, 0.0) for h, x in enumerate(columns))
    _, to_raw = jax.vjp(partial(write_strength, options=options), beta[0, 0])
    target[0, 0] = to_raw(jnp.transpose(db_CH))[0]
