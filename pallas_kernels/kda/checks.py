"""Validation of KDA's arguments, before any computation is traced.

Each message names the argument, what came, what was expected and how to mend it.
"""

import math
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.gates import Inputs, Options, accumulation_dtype

Array = jax.Array
Sizes = dict[str, int]

CHUNK_SIZES = (16, 32, 64, 128)
LOWEST_BOUND = -5.0


def check_arrays(
    inputs: Inputs,
    state: Array | None,
    segment_ids: Array | None,
    lead: tuple[str, ...],
    state_name: str = "initial_state",
) -> None:
    """Raises ValueError unless all shapes and dtypes fit together.

    Args:
      inputs: raw inputs.
      state: state before the first token, or None.
      segment_ids: documents, or None.
      lead: names of the axes before the heads, ("B", "T") or ("B",).
      state_name: what the caller calls the state.
    """
    sizes = _sizes(inputs, lead)
    expected = {
        "k": (inputs.k, (*lead, "H", "K")),
        "v": (inputs.v, (*lead, "HV", "V")),
        "g": (inputs.g, (*lead, "HV", "K")),
        "beta": (inputs.beta, (*lead, "HV")),
        "A_log": (inputs.A_log, ("HV",)),
        "dt_bias": (inputs.dt_bias, ("HV*K",)),
        state_name: (state, ("B", "HV", "K", "V")),
        "segment_ids": (segment_ids, lead),
    }
    for name, (array, axes) in expected.items():
        if array is None:
            continue
        shape = tuple(sizes[axis] for axis in axes)
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected [{', '.join(axes)}] = "
                f"{shape}{_shape_hint(name, array.shape, shape, sizes)}"
            )
    for name, array in inputs._asdict().items():
        if array is not None:
            _check_float(name, array)
    _check_state_and_ids(inputs, state, segment_ids, state_name)


def check_options(inputs: Inputs, options: Options) -> None:
    """Raises ValueError unless the options make sense together."""
    bound = options.lower_bound
    numbers: dict[str, object] = {"scale": options.scale, "lower_bound": bound}
    for name, number in numbers.items():
        if number is not None and not isinstance(number, Real):
            raise ValueError(
                f"{name}={number!r} is not a Python number; it is compiled in, so it "
                "cannot be an array"
            )
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name}={number}: must be finite")
    if bound is not None and not LOWEST_BOUND <= bound < 0:
        raise ValueError(
            f"lower_bound={bound} is outside [{LOWEST_BOUND}, 0): below it 16 tokens "
            "overflow float32; use None for an unbounded gate"
        )
    chunk = options.chunk_size
    if chunk not in CHUNK_SIZES or not isinstance(chunk, (int, np.integer)):
        raise ValueError(
            f"chunk_size={chunk!r} is not supported; use one of the integers "
            f"{', '.join(map(str, CHUNK_SIZES))}"
        )
    gate_parameters = inputs.A_log is not None or inputs.dt_bias is not None
    if gate_parameters and not options.use_gate_in_kernel:
        raise ValueError(
            "A_log and dt_bias are read only with use_gate_in_kernel=True; set it, or "
            "leave them out because g already holds log decays"
        )
    if options.use_gate_in_kernel and bound is None and inputs.A_log is None:
        raise ValueError(
            "A_log is None, but the unbounded gate -exp(A_log) * softplus(g + dt_bias) "
            "needs it; pass A_log [HV], or lower_bound for the bounded gate"
        )
    if options.allow_neg_eigval and not options.use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta and needs "
            "use_beta_sigmoid=True; without it, pass beta in [0, 2] directly"
        )


def _sizes(inputs: Inputs, lead: tuple[str, ...]) -> Sizes:
    """Reads the axis sizes off q and v."""
    for name, array, axes in (
        ("q", inputs.q, (*lead, "H", "K")),
        ("v", inputs.v, (*lead, "HV", "V")),
    ):
        if array.ndim != len(axes):
            raise ValueError(
                f"{name} has shape {array.shape}, expected {len(axes)} axes "
                f"[{', '.join(axes)}]; heads come after time, as in [B, T, H, D]"
            )
        if 0 in (array.shape[0], *array.shape[len(lead) :]):
            raise ValueError(
                f"{name} has shape {array.shape}; rows, heads and head width must not "
                "be 0"
            )
    sizes = dict(zip(lead, inputs.q.shape[: len(lead)], strict=True))
    sizes["H"], sizes["K"] = inputs.q.shape[-2:]
    sizes["HV"], sizes["V"] = inputs.v.shape[-2:]
    sizes["HV*K"] = sizes["HV"] * sizes["K"]
    if sizes["HV"] % sizes["H"]:
        raise ValueError(
            f"v has HV={sizes['HV']} heads and q has H={sizes['H']}; HV must be a "
            "multiple of H, because value head hv reads head hv // (HV // H)"
        )
    return sizes


def _shape_hint(name: str, got: tuple, expected: tuple, sizes: Sizes) -> str:
    """What the caller most likely did, if the wrong shape tells."""
    if name == "g" and got == expected[:-1]:
        return "; broadcast one decay per head over K with g[..., None]"
    if name == "g" and got == (*expected[:-2], sizes["H"], sizes["K"]):
        return "; g follows the heads of v, so repeat it HV // H times"
    if name == "beta" and got == expected[:-1]:
        return "; beta needs one value per head of v"
    if name == "beta" and got == (*expected, 1):
        return "; drop the last axis with beta[..., 0]"
    if name == "dt_bias" and got == (sizes["HV"],):
        return "; repeat one bias per head with jnp.repeat(dt_bias, K)"
    if name == "dt_bias" and got == (sizes["HV"], sizes["K"]):
        return "; flatten it with dt_bias.reshape(-1)"
    if name in ("state", "initial_state"):
        if got == (*expected[:-2], expected[-1], expected[-2]):
            return "; the state is [K, V], use jnp.swapaxes(state, -1, -2)"
        return "; one state per row and value head"
    return ""


def _check_float(name: str, array: Array) -> None:
    if array.dtype == jnp.float16:
        raise ValueError(
            f"{name} has dtype float16, expected float32 or bfloat16: decay factors "
            "inside a chunk exceed the range of float16; use bfloat16"
        )
    if array.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"{name} has dtype {array.dtype}, expected float32 or bfloat16; convert "
            "it with .astype"
        )


def _check_state_and_ids(
    inputs: Inputs, state: Array | None, segment_ids: Array | None, state_name: str
) -> None:
    dtype = accumulation_dtype(*inputs[:5])
    if state is not None and state.dtype != dtype:
        raise ValueError(
            f"{state_name} has dtype {state.dtype}, expected {dtype}: the state keeps "
            f"full precision; convert it with .astype('{dtype}')"
        )
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids has dtype {segment_ids.dtype}, expected int32 with 0 for "
            "padding; convert it with .astype(jnp.int32)"
        )
    if (ids := _values(segment_ids)) is not None:
        _check_no_id_returns(ids)


def _values(segment_ids: object) -> np.ndarray | None:
    """Ids that have values here: not those under `jax.jit`, nor of other processes."""
    if segment_ids is None or isinstance(segment_ids, jax.core.Tracer):
        return None
    if not getattr(segment_ids, "is_fully_addressable", True):
        return None
    return np.asarray(segment_ids)


def check_ids_fit(segment_ids: object) -> None:
    """Raises ValueError for ids that int32 would turn into others, or below 0."""
    ids = _values(segment_ids)
    if ids is None or ids.dtype.kind not in "iu":
        return
    largest = np.iinfo(np.int32).max
    wrong = np.argwhere((ids < 0) | (ids > largest))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(
            f"segment_ids has {ids[at]} at {list(at)}, expected 0 for padding and 1 to "
            f"{largest} for documents; number them anew"
        )


def _check_no_id_returns(ids_BT: np.ndarray) -> None:
    """An id that stands on both sides of another would be two documents, not one."""
    for row, ids in enumerate(ids_BT):
        at = np.flatnonzero(ids)
        starts = at[np.flatnonzero(np.diff(ids[at], prepend=0))]
        found, firsts = np.unique(ids[starts], return_index=True)
        if len(found) < len(starts):
            again = np.setdiff1d(np.arange(len(starts)), firsts)[0]
            raise ValueError(
                f"segment_ids of row {row} has id {ids[starts[again]]} again at token "
                f"{starts[again]}, after a document of another id: tokens of a "
                "document must be neighbours; sort them, or number documents apart"
            )
