"""Chunked KDA in Pallas kernels for TPUs, with its own backward pass.

One kernel each way; the state runs over the chunks inside. The algebra is that of
`xla.py`; `tpu/` holds the kernels. Saved for the backward pass: the raw inputs, the
state that enters each chunk, named "kda_states", and A, named "kda_matrices", for remat
policies.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.reference import step_gradients
from pallas_kernels.kda.segments import Runs
from pallas_kernels.kda.tpu import passes
from pallas_kernels.kda.tpu.step import step

Array = jax.Array

WIDTHS = (64, 128, 256)
# Above this, heads have to come in multiples of 8.
MOST_HEADS = 16


class Residuals(NamedTuple):
    """What the backward pass needs; states [B,chunks,HV,V,K]; a as it was cut."""

    inputs: Inputs
    runs: Runs | None
    states: Array
    a: Array


def why_not(
    platform: str, inputs: Inputs | None = None, by_name: bool = False
) -> str | None:
    """Says what keeps the kernels from running, or None.

    Args:
      platform: "cpu", "gpu" or "tpu".
      inputs: raw inputs, whose sizes and dtypes count too; None leaves them out.
      by_name: the caller asked for these kernels, so Pallas's interpreter will do.
    """
    interpreted = by_name and platform == "cpu"
    if platform != "tpu" and not interpreted:
        return f"it needs a TPU, and this is {platform}"
    if inputs is None:
        return None
    for name, width in (("K", inputs.q.shape[-1]), ("V", inputs.v.shape[-1])):
        if width not in WIDTHS and not interpreted:
            return f"heads have {name}={width}, not one of {WIDTHS}"
    heads = inputs.v.shape[-2]
    if heads > MOST_HEADS and heads % 8:
        return f"v has {heads} heads, and above {MOST_HEADS} it must be a multiple of 8"
    for name, x in inputs._asdict().items():
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {x.dtype}, not bfloat16 or float32"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def kda_mosaic_tpu(
    inputs: Inputs, initial_state_BHKV: Array, runs: Runs | None, options: Options
) -> tuple[Array, Array]:
    """Runs KDA over all tokens, `options.chunk_size` at a time.

    Args:
      inputs: raw inputs, at least one token.
      initial_state_BHKV: state [B,HV,K,V], float32.
      runs: documents of each row, or None for one document per row.
      options: static settings.

    Returns:
      o [B,T,HV,V] in v's dtype, and the final state.
    """
    made = _forward(inputs, initial_state_BHKV, runs, options, save=False)
    return made["o"], made["s_out"]


def _save(inputs, initial_state_BHKV, runs, options):
    made = _forward(inputs, initial_state_BHKV, runs, options, save=True)
    states = checkpoint_name(made["states"], "kda_states")
    a = checkpoint_name(made["a"], "kda_matrices")
    return (made["o"], made["s_out"]), Residuals(inputs, runs, states, a)


def _differentiate(options, saved, cotangents):
    @jax.custom_batching.sequential_vmap
    def run(saved, do, dstate):
        inputs, runs, states, a = saved
        wide = _with_all_heads(inputs)
        made, dinitial = passes.backward(wide, runs, states, a, do, dstate, options)
        dq, dk = (
            _sum_groups(dx, x) for dx, x in zip(made[:2], inputs[:2], strict=True)
        )
        return made._replace(q=dq, k=dk), dinitial

    do_BTHV, dfinal_state = cotangents
    dinputs, dinitial_state = run(saved, do_BTHV, dfinal_state)
    return dinputs, dinitial_state, None


kda_mosaic_tpu.defvjp(_save, _differentiate)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def step_mosaic_tpu(
    inputs: Inputs, state_BHKV: Array, options: Options
) -> tuple[Array, Array]:
    """One token, all in one kernel; arguments and results as `step_triton`."""

    @jax.custom_batching.sequential_vmap
    def run(inputs, state):
        return tuple(step(_with_all_heads(inputs), state, options))

    return run(inputs, state_BHKV)


def _step_save(inputs, state, options):
    return step_mosaic_tpu(inputs, state, options), (inputs, state)


def _step_differentiate(options, saved, cotangents):
    inputs, state = saved
    return step_gradients(inputs, state, options, cotangents)


step_mosaic_tpu.defvjp(_step_save, _step_differentiate)


def _forward(inputs, state, runs, options, save):
    @jax.custom_batching.sequential_vmap
    def run(inputs, state, runs):
        return passes.forward(_with_all_heads(inputs), state, runs, options, save)

    return run(inputs, state, runs)


def _with_all_heads(inputs: Inputs) -> Inputs:
    """Repeats q and k for the value heads that share them."""
    group = inputs.v.shape[-2] // inputs.q.shape[-2]
    if group == 1:
        return inputs
    q, k = (jnp.repeat(x, group, axis=-2) for x in inputs[:2])
    return inputs._replace(q=q, k=k)


def _sum_groups(dx_BTHK: Array, x: Array) -> Array:
    """Adds up the value heads that share a key head."""
    grouped = dx_BTHK.reshape(*x.shape[:3], -1, x.shape[3])
    return jnp.sum(grouped, axis=3, dtype=jnp.float32).astype(x.dtype)
