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
    Raw,
    join,
    make_rows,
    prepare,
    read,
    read_raw,
    read_states,
    stack_groups,
    unstack,
    write_states,
)
from pallas_kernels.kda.tpu.stacks import Spec, make_masks, select

Array = jax.Array
Refs = dict[str, Any]

# Stacks that share a pass over the rows.
STACKS = 2


def backward_kernel(
    refs: Refs, outputs: Refs, scratch: Refs, spec: Spec, options: Options
) -> None:
    """Gradients of one chunk by the raw inputs."""
    dstate = scratch["dstate"]
    load_state(dstate, refs["ds_in"])
    masks = make_masks(spec, refs["codes"][0, 0] if spec.packed else None)
    groups, parts = stack_groups(spec, dstate.shape[0], STACKS), []
    for which in groups:
        raw = read_raw(refs, spec, masks, which)
        prepared, to_raw = jax.vjp(partial(prepare, options), raw)
        rows = make_rows(refs, spec, masks, which, prepared, options)
        parts.append((to_raw, rows, chunk.local(spec, masks, rows)))
    known, before = chunk.backward_states(
        spec,
        join([chunk.serial(rows, part) for _, rows, part in parts]),
        _block_diagonal(spec, masks, refs["a"][0, 0]),
        read(refs, spec, masks, range(dstate.shape[0]), "do"),
        read_states(refs["states"].at[0, 0], spec),
        read_states(dstate, spec),
    )
    write_states(dstate, spec, before)
    found: dict[str, list[Array]] = {name: [] for name in (*Raw._fields, "v", "b")}
    for which, (to_raw, rows, part) in zip(groups, parts, strict=True):
        stacks = slice(which.start // spec.G, which.stop // spec.G)
        here = jax.tree.map(lambda x: x[stacks], known)  # noqa: B023
        drows = chunk.backward_rows(spec, masks, rows, part, here)
        (draw,) = to_raw((drows.q, drows.k, select(masks.real, drows.g)))
        made = {**draw._asdict(), "v": drows.v, "b": drows.b}
        for name, dx in made.items():
            found[name] += unstack(spec, dx) if dx.ndim == 3 else []
    for name in "qkgv":
        heads.store(outputs[f"d{name}"], found[name], spec.words)
    if "dgate" in outputs:
        _add_gate(outputs["dgate"], found["slope"], found["bias"])
    _store_strength(outputs["dbeta"], refs["beta"], spec, options, found["b"])
    store_state(outputs["ds_out"], dstate)


def _block_diagonal(spec: Spec, masks: Any, a_NCR: Array) -> Array:
    a_NRR = jnp.concatenate([a_NCR.astype(jnp.float32)] * spec.G, axis=1)
    return jnp.where(masks.i // spec.C == masks.j // spec.C, a_NRR, 0.0)


def _add_gate(target: Any, dslope: list[Array], dbias: list[Array]) -> None:
    """Sums over tokens, of all chunks so far; target [1,2,HB,K]."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        target[...] = jnp.zeros_like(target)

    for row, dx in enumerate((dslope, dbias)):
        sums = [jnp.sum(x, axis=0, keepdims=True) for x in dx]
        target[0, row] += jnp.concatenate(sums)


def _store_strength(
    target: Any, beta: Any, spec: Spec, options: Options, columns: list[Array]
) -> None:
    """Gradient by the raw beta, [1,1,HB,C], from columns [N,R,1]."""
    at = jax.lax.broadcasted_iota(jnp.int32, (spec.C, len(columns)), 1)
    db_CH = sum(jnp.where(at == h, x, 0.0) for h, x in enumerate(columns))
    _, to_raw = jax.vjp(partial(write_strength, options=options), beta[0, 0])
    target[0, 0] = to_raw(jnp.transpose(db_CH))[0]
