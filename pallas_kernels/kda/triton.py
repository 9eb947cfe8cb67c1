"""Chunked KDA in Triton kernels, with its own backward pass.

    intra    per chunk: decay factors, A, P                        (parallel)
    scan     per head: states and outputs                          (serial in time)
    reverse  per head: gradients of the states, last to first      (serial in time)
    grads    per chunk: gradients by the raw inputs                (parallel)

The algebra is that of `xla.py`; `gpu/` holds the kernels. Saved for the backward pass:
the raw inputs, the state that enters each chunk, named "kda_states", and the chunk
tensors, named "kda_matrices", for remat policies. Triton is imported inside functions
alone: other devices do not need it.
"""

import importlib.util
import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.plan import Chunks, Plan
from pallas_kernels.kda.reference import step_gradients
from pallas_kernels.kda.segments import Runs

Array = jax.Array

WIDTHS = (16, 32, 64, 128)


class Residuals(NamedTuple):
    """For the backward pass: s [N,V,K], transposed states; x [N,C,V]; o [B,T,HV,V]."""

    inputs: Inputs
    codes: Array | None
    passes: Array | None
    chunks: Chunks
    s: Array
    x: Array
    o: Array


def why_not(
    platform: str, inputs: Inputs | None = None, by_name: bool = False
) -> str | None:
    """Says what keeps the kernels from running, or None.

    Args:
      platform: as `jax.default_backend()` returns it.
      inputs: raw inputs, whose sizes and dtypes count too; None leaves them out.
      by_name: the caller asked for these kernels, so Triton's interpreter will do.
    """
    interpreted = by_name and os.environ.get("TRITON_INTERPRET") == "1"
    if platform != "gpu" and not interpreted:
        return f"it needs an NVIDIA GPU, and this is {platform}"
    needed = ("triton",) if interpreted else ("triton", "jax_triton")
    for module in needed:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; pip install 'kimi_jax[gpu]'"
    if not interpreted and (obstacle := _device_obstacle()):
        return obstacle
    if inputs is None:
        return None
    for name, width in (("K", inputs.q.shape[-1]), ("V", inputs.v.shape[-1])):
        if width not in WIDTHS:
            return f"heads have {name}={width}, not one of {WIDTHS}"
    for name, x in inputs._asdict().items():
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {x.dtype}, not bfloat16 or float32"
    return None


def _device_obstacle() -> str | None:
    """Tensor-memory descriptors came with Hopper."""
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability.replace(".", "").isdigit() and float(capability) >= 9.0:
        return None
    return f"it needs compute capability 9.0, and {device.device_kind} has {capability}"


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def kda_triton(
    inputs: Inputs, initial_state_BHKV: Array, runs: Runs | None, options: Options
) -> tuple[Array, Array]:
    """Runs KDA over all tokens, `options.chunk_size` at a time but at most 64.

    Args:
      inputs: raw inputs, at least one token.
      initial_state_BHKV: state [B,HV,K,V], float32.
      runs: documents of each row, or None for one document per row.
      options: static settings.

    Returns:
      o [B,T,HV,V] in v's dtype, and the final state.
    """
    return _forward(inputs, initial_state_BHKV, runs, options, False)[0]


def _save(inputs, initial_state_BHKV, runs, options):
    outputs, (chunks, s, x) = _forward(inputs, initial_state_BHKV, runs, options, True)
    chunks = jax.tree.map(partial(checkpoint_name, name="kda_matrices"), chunks)
    o, last = outputs
    s, x, o = (checkpoint_name(y, "kda_states") for y in (s, x, o))
    passes = None if runs is None else runs.passes_RB
    return (o, last), Residuals(inputs, _codes(runs), passes, chunks, s, x, o)


def _differentiate(options, saved, cotangents):
    from pallas_kernels.kda.gpu.launch import match_axes

    do_BTHV, dfinal_state = cotangents
    dinputs, dinitial_state = _backward(saved, do_BTHV, dfinal_state, options)
    return jax.tree.map(match_axes, dinputs, saved.inputs), dinitial_state, None


kda_triton.defvjp(_save, _differentiate)


def _forward(inputs, state, runs, options, save):
    @jax.custom_batching.sequential_vmap
    def run(inputs, state, codes, passes):
        plan = Plan(inputs, codes, options)
        chunks = plan.intra(inputs, codes)
        o, s, x, final_state = plan.scan(inputs, passes, chunks, state, save)
        return (o, final_state), (chunks, s, x)

    return run(inputs, state, _codes(runs), None if runs is None else runs.passes_RB)


def _backward(saved, do, dfinal_state, options):
    @jax.custom_batching.sequential_vmap
    def run(saved, do, dfinal_state):
        inputs, codes, passes, chunks, s, x, o = saved
        plan = Plan(inputs, codes, options)
        dr, ds, dinitial_state = plan.reverse(codes, passes, chunks, do, dfinal_state)
        pairs = plan.pairs(inputs, codes, chunks.b, do, o, x, dr)
        dinputs = plan.grads(inputs, codes, chunks, s, x, do, dr, ds, pairs)
        return dinputs, dinitial_state

    return run(saved, do, dfinal_state)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def step_triton(
    inputs: Inputs, state_BHKV: Array, options: Options
) -> tuple[Array, Array]:
    """One token, all in one kernel.

    Args:
      inputs: raw inputs of the token, without the axis of time.
      state_BHKV: state [B,HV,K,V], float32.
      options: static settings.

    Returns:
      o [B,HV,V] in v's dtype, and the new state.
    """
    return jax.custom_batching.sequential_vmap(partial(_step, options=options))(
        inputs, state_BHKV
    )


def _step(inputs, state, options):
    from pallas_kernels.kda.gpu.launch import launch
    from pallas_kernels.kda.gpu.step import step_kernel

    longer = Inputs(*(x[:, None] for x in inputs[:5]), *inputs[5:])
    plan = Plan(longer, None, options)
    width = min(plan.V, 64)
    arrays = {**plan.raw(inputs, None), "v": inputs.v, "state": state}
    del arrays["ids"]
    names = ("scale", "bound", "H", "HV", "K", "GATE", "NORM", "SIGMOID", "DOUBLE")
    outputs = {
        "o": jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype),
        "state": jax.ShapeDtypeStruct(state.shape, state.dtype),
    }
    return launch(
        step_kernel,
        arrays,
        outputs,
        plan.B * plan.HV * (plan.V // width),
        num_warps=4,
        num_stages=1,
        V=plan.V,
        BV=width,
        **{name: plan.activations()[name] for name in names},
    )


def _step_save(inputs, state, options):
    return step_triton(inputs, state, options), (inputs, state)


def _step_differentiate(options, saved, cotangents):
    inputs, state = saved
    return step_gradients(inputs, state, options, cotangents)


step_triton.defvjp(_step_save, _step_differentiate)


def _codes(runs: Runs | None) -> Array | None:
    """2 * run + real of every token: one array for the kernels."""
    if runs is None:
        return None
    return 2 * runs.run_BT + runs.real_BT.astype(jnp.int32)
