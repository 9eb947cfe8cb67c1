"""Public entry points of KDA: arguments, defaults, choice of implementation.

Names and meanings follow flash-linear-attention's `chunk_kda`, except that documents
packed into one row are given as `segment_ids` and that the state is laid out [K,V].

Both entry points take these settings:
  A_log: [HV], log of the gate's slope. The bounded gate can do without, as if 0.
  dt_bias: [HV*K], flat, added to the gate's logits; None means 0.
  lower_bound: smallest log decay per token, in [-5, 0), or None for no bound. With
    `use_gate_in_kernel` it selects the gate: lower_bound * sigmoid(exp(A_log) *
    (g + dt_bias)), or -exp(A_log) * softplus(g + dt_bias) for None. Without, it is the
    caller's promise that g >= lower_bound, which saves time; if broken, exp overflows.
  scale: factor on q; None means K ** -0.5.
  use_gate_in_kernel: g holds the gate's logits instead of log decays.
  use_qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6).
  use_beta_sigmoid: beta holds logits.
  allow_neg_eigval: double the sigmoid of beta, which then reaches 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.kda import mosaic_tpu, target, triton
from pallas_kernels.kda.checks import check_arrays, check_ids_fit, check_options
from pallas_kernels.kda.gates import Inputs, Options, accumulation_dtype, prepare
from pallas_kernels.kda.reference import kda_reference, update
from pallas_kernels.kda.segments import Runs, find_runs
from pallas_kernels.kda.xla import kda_xla

Array = jax.Array

_Implementation = Callable[[Inputs, Array, Runs | None, Options], tuple[Array, Array]]
_IMPLEMENTATIONS: dict[str, _Implementation] = {
    "triton": triton.kda_triton,
    "mosaic_tpu": mosaic_tpu.kda_mosaic_tpu,
    "xla": kda_xla,
    "reference": kda_reference,
}
# What `residuals` keeps for the backward pass besides the inputs, as policies of
# `jax.checkpoint`: everything, which needs none; the states between chunks, so that the
# inside of chunks is computed again; nothing, so that the forward pass is run again.
_KEPT = {
    "all": None,
    "states": jax.checkpoint_policies.save_only_these_names("kda_states"),
    "none": jax.checkpoint_policies.nothing_saveable,
}
_STEPS = {"triton": triton.step_triton, "mosaic_tpu": mosaic_tpu.step_mosaic_tpu}
_OBSTACLES = {"triton": triton.why_not, "mosaic_tpu": mosaic_tpu.why_not}


def choose_implementation(
    implementation: str | None, platform: str, inputs: Inputs | None = None
) -> tuple[str, str]:
    """Says which implementation `kda` runs, and why.

    Args:
      implementation: what the caller asked for; None leaves the choice to us: the
        Triton kernels or those for TPUs where they run, else chunked XLA.
      platform: "cpu", "gpu" or "tpu", see `target.platform`.
      inputs: raw inputs, whose sizes and dtypes count too; None answers without.

    Returns:
      (name, reason), the reason fit for a log line.

    Raises:
      ValueError: unknown implementation, or one that cannot run here.
    """
    if implementation is None:
        name = "mosaic_tpu" if platform == "tpu" else "triton"
        obstacle = _OBSTACLES[name](platform, inputs)
        if obstacle is None:
            return name, f"fused kernels for this {platform.upper()}"
        return "xla", f"chunked XLA runs everywhere; not {name}: {obstacle}"
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in _IMPLEMENTATIONS)
        raise ValueError(
            f"implementation={implementation!r} does not exist; choose one of {names}, "
            "or None for the default"
        )
    why_not = _OBSTACLES.get(implementation)
    if why_not is not None and (obstacle := why_not(platform, inputs, True)):
        raise ValueError(
            f"implementation={implementation!r} cannot run here: {obstacle}; use "
            "'xla', or None for the default"
        )
    return implementation, "asked for by name"


def kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
    residuals: str = "all",
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Kimi Delta Attention over whole sequences, differentiable in every float input.

    Inputs are float32 or bfloat16 (float64 under x64); the state is float32 (float64
    if any input is). No output depends on later tokens, to the last bit.

    Args:
      q, k, v: [B,T,H,K] twice, [B,T,HV,V]. Value head hv reads head hv // (HV // H).
      g: [B,T,HV,K], natural log of the decay, <= 0.
      beta: [B,T,HV], write strength in [0, 2].
      initial_state: [B,HV,K,V], for the first document of each row; None means 0.
      segment_ids: [B,T] integers. 0 is padding: it outputs 0 and leaves the state
        alone. A run of one positive id is a document and starts from a zero state;
        padding never splits a run. An id must not return after another (unchecked
        under `jax.jit`). None means one document per row.
      output_final_state: also return the state after the last token.
      chunk_size: 16, 32, 64 or 128; changes speed and memory, not the result.
      residuals: "all", "states" or "none": see `_KEPT`; memory against time.
      axis: inside `jax.shard_map`, the mesh axis that time is split over, for Triton
        kernels alone; `kimi_jax.ops.context_kda` is for all, and says the rest.
      others: see this module, and `choose_implementation`.

    Returns:
      o [B,T,HV,V] in v's dtype; the final state [B,HV,K,V] or None.

    Raises:
      ValueError: a shape, dtype or setting that does not fit, and how to mend it.
    """
    inputs = _inputs(q, k, v, g, beta, A_log, dt_bias)
    state, ids = _optional(initial_state), _checked_ids(segment_ids)
    check_arrays(inputs, state, ids, lead=("B", "T"))
    flags = use_gate_in_kernel, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    options = Options(scale, lower_bound, *flags, chunk_size, axis)
    check_options(inputs, options)
    name, _ = choose_implementation(implementation, target.platform(), inputs)
    o, state = _run(name, inputs, state, ids, options, residuals)
    return o.astype(inputs.v.dtype), state if output_final_state else None


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Advances the state by one token, for decoding.

    Args:
      q, k: [B,H,K]. Value head hv reads head hv // (HV // H).
      v: [B,HV,V], HV a multiple of H.
      g: [B,HV,K], natural log of the decay, <= 0.
      beta: [B,HV], write strength in [0, 2].
      state: [B,HV,K,V], float32 (float64 if any input is).
      others: see this module.

    Returns:
      o [B,HV,V] in v's dtype, and the new state.

    Raises:
      ValueError: a shape, dtype or setting that does not fit, and how to mend it.
    """
    if state is None:
        raise ValueError("state is None; begin with jnp.zeros of [B, HV, K, V]")
    inputs = _inputs(q, k, v, g, beta, A_log, dt_bias)
    state = jnp.asarray(state)
    check_arrays(inputs, state, None, lead=("B",), state_name="state")
    flags = use_gate_in_kernel, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    options = Options(scale, lower_bound, *flags)
    check_options(inputs, options)
    name, _ = choose_implementation(implementation, target.platform(), inputs)
    if name in _STEPS:
        return _STEPS[name](inputs, state, options)
    state, o = update(state, prepare(inputs, None, options, state.dtype))
    return o.astype(inputs.v.dtype), state


def _run(
    name: str,
    inputs: Inputs,
    state: Array | None,
    segment_ids: Array | None,
    options: Options,
    residuals: str,
) -> tuple[Array, Array]:
    """Fills in what was left out, and calls the implementation."""
    if residuals not in _KEPT:
        raise ValueError(f"residuals={residuals!r}: choose one of {', '.join(_KEPT)}")
    if options.axis is not None and name != "triton":
        raise ValueError(
            f"axis={options.axis!r}: {name!r} does not exchange states, only 'triton' "
            "does; call kimi_jax.ops.context_kda, which runs anywhere"
        )
    if state is None:
        state = _zero_state(inputs)
    time = inputs.v.shape[1]
    if time == 0:
        return jnp.zeros_like(inputs.v), state
    runs = None if segment_ids is None else find_runs(segment_ids, options.axis)
    options = options._replace(chunk_size=_fit_chunk(options.chunk_size, time))

    def forward(inputs: Inputs, state: Array, runs: Runs | None) -> tuple[Array, Array]:
        return _IMPLEMENTATIONS[name](inputs, state, runs, options)

    if residuals != "all":
        forward = jax.checkpoint(forward, policy=_KEPT[residuals])
    return forward(inputs, state, runs)


def _zero_state(inputs: Inputs) -> Array:
    """Returns zeros [B,HV,K,V] that vary over the mesh axes that g and v vary over.

    Inside `jax.shard_map` a plain jnp.zeros would not, and could not start a scan.
    """
    dtype = accumulation_dtype(*inputs[:5])
    g_BHK, v_BHV = jnp.sum(inputs.g, axis=1), jnp.sum(inputs.v, axis=1)
    like_BHKV = jax.lax.stop_gradient(g_BHK[..., None] * v_BHV[..., None, :])
    return jnp.where(False, like_BHKV.astype(dtype), 0.0)


def _fit_chunk(chunk: int, time: int) -> int:
    """Halves the chunk while all tokens fit into one half of it."""
    while chunk > 16 and time <= chunk // 2:
        chunk //= 2
    return chunk


def _inputs(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
) -> Inputs:
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if missing := [name for name, x in given.items() if x is None]:
        raise ValueError(f"{', '.join(missing)} is None; pass an array")
    q, k, v, g, beta = map(jnp.asarray, given.values())
    return Inputs(q, k, v, g, beta, _optional(A_log), _optional(dt_bias))


def _checked_ids(segment_ids: Array | None) -> Array | None:
    check_ids_fit(segment_ids)  # before they are int32
    return _optional(segment_ids)


def _optional(x: Array | None) -> Array | None:
    return None if x is None else jnp.asarray(x)
