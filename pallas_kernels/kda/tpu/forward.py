"""The forward kernel: one program a chunk and block of heads, chunks in sequence.

Blocks are cut from the arrays as they come, [B,T,HV,D]. The state of each head stays in
on-chip memory from the first chunk to the last.
"""

import functools
import operator
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.kda.gates import Options
from pallas_kernels.kda.tpu import chunk, heads
from pallas_kernels.kda.tpu.rows import (
    join,
    make_rows,
    prepare,
    read_raw,
    read_states,
    stack_groups,
    unstack,
    write_states,
)
from pallas_kernels.kda.tpu.stacks import Spec, by_head, make_masks

Refs = dict[str, Any]


def forward_kernel(
    refs: Refs, outputs: Refs, scratch: Refs, spec: Spec, options: Options
) -> None:
    """Outputs of one chunk; also A and the states before it, where asked for."""
    state = scratch["state"]
    load_state(state, refs["s_in"])
    if "states" in outputs:
        outputs["states"][0, 0] = state[...].astype(outputs["states"].dtype)
    masks = make_masks(spec, refs["codes"][0, 0] if spec.packed else None)
    found = []
    for which in stack_groups(spec, state.shape[0], 1):
        prepared = prepare(options, read_raw(refs, spec, masks, which))
        rows = make_rows(refs, spec, masks, which, prepared, options)
        found.append(chunk.serial(rows, chunk.local(spec, masks, rows)))
    o, states, a = chunk.forward(spec, masks, join(found), read_states(state, spec))
    write_states(state, spec, states)
    heads.store(outputs["o"], unstack(spec, o), spec.words)
    if "a" in outputs:
        # Block diagonal, so that the sum over heads loses nothing.
        total = functools.reduce(operator.add, by_head(spec, a))
        outputs["a"][0, 0] = total.astype(outputs["a"].dtype)
    store_state(outputs["s_out"], state)


def load_state(state: Any, source: Any) -> None:
    """In the first step: [HB,V,K] from [1,HB,K,V]."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        @pl.loop(0, state.shape[0])
        def _(h: Any) -> None:
            state[h] = source[0, h].T


def store_state(target: Any, state: Any) -> None:
    """In the last step: [1,HB,K,V] from [HB,V,K]."""

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        @pl.loop(0, state.shape[0])
        def _(h: Any) -> None:
            target[0, h] = state[h].T
