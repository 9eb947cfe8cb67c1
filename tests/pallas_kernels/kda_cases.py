"""Inputs, an independent oracle and compiled runners for the KDA tests."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import kda

B, T, H, HV, K, V = 2, 150, 1, 2, 6, 5
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

_GATE = ("A_log", "dt_bias")
KINDS = (
    "random",
    "floor",
    "steps",
    "no decay",
    "near duplicates",
    "identical keys",
    "beta 0 or 1",
    "beta up to 2",
    "unbounded",
)
BOUNDED_KINDS = KINDS[:-1]

# Everything the kernel can do before the recurrence, as the K3 layer uses it.
IN_KERNEL = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
}


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def raw(time: int = T) -> dict[str, np.ndarray]:
    """Logits for the gate and for beta, unnormalised q and k."""
    return {
        "q": draw(0, B, time, H, K),
        "k": draw(1, B, time, H, K),
        "v": draw(2, B, time, HV, V),
        "g": draw(3, B, time, HV, K),
        "beta": draw(4, B, time, HV),
        "A_log": 0.3 * draw(5, HV),
        "dt_bias": draw(6, HV * K),
        "initial_state": draw(7, B, HV, K, V),
    }


def prepared(kind: str, time: int = T) -> dict[str, np.ndarray]:
    """Log decays, write strengths and unit keys, by kind of difficulty."""
    x = {key: value for key, value in raw(time).items() if key not in _GATE}
    uniform = np.random.default_rng(8).uniform(size=(B, time, HV, K))
    x["q"], x["k"] = unit(x["q"]), unit(x["k"])
    x["g"] = -5.0 * uniform**3
    x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    if kind == "floor":
        x["g"] = np.full_like(x["g"], -5.0)
    elif kind == "steps":
        # Long stretches without decay next to the strongest decay.
        x["g"] = np.where(
            np.arange(time)[:, None, None] % 20 < 12, -5.0, -1e-3 * uniform
        )
    elif kind == "no decay":
        x["g"] = np.zeros_like(x["g"])
    elif kind == "near duplicates":
        x["k"] = unit(x["k"][:, :1] + 0.05 * x["k"])
        x["beta"], x["g"] = np.ones_like(x["beta"]), np.zeros_like(x["g"])
    elif kind == "identical keys":
        x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
        x["beta"], x["g"] = np.ones_like(x["beta"]), np.zeros_like(x["g"])
    elif kind == "beta 0 or 1":
        x["beta"] = np.round(x["beta"])
    elif kind == "beta up to 2":
        x["beta"] = 1.0 + x["beta"]
    elif kind == "unbounded":
        x["g"] = -np.exp(3.0 * draw(9, B, time, HV, K))
    else:
        assert kind == "random", kind
    return x


def oracle(x: dict[str, np.ndarray], segment_ids=None, **settings):
    """KDA in numpy float64: one row, head and token at a time.

    Returns o, final state.
    """
    x = {name: np.asarray(value, np.float64) for name, value in x.items()}
    batch, time, heads, width = x["v"].shape
    group = heads // x["q"].shape[2]
    states = x["initial_state"].copy()
    o = np.zeros((batch, time, heads, width))
    for b in range(batch):
        for h in range(heads):
            state, document = states[b, h], 0
            for t in range(time):
                if segment_ids is not None:
                    new = segment_ids[b, t]
                    if new == 0:
                        continue
                    if document not in (0, new):
                        state = np.zeros_like(state)
                    document = new
                q, k, v, g, beta = _token(x, settings, b, t, h, group)
                decayed = np.exp(g)[:, None] * state
                erased = np.eye(len(k)) - beta * np.outer(k, k)
                state = erased @ decayed + beta * np.outer(k, v)
                o[b, t, h] = settings.get("scale", len(k) ** -0.5) * (q @ state)
            states[b, h] = state
    return o, states


def _token(x, settings, b, t, h, group):
    q, k, v = x["q"][b, t, h // group], x["k"][b, t, h // group], x["v"][b, t, h]
    g, beta = x["g"][b, t, h], x["beta"][b, t, h]
    if settings.get("use_qk_l2norm"):
        q, k = q / np.sqrt(q @ q + 1e-6), k / np.sqrt(k @ k + 1e-6)
    if settings.get("use_gate_in_kernel"):
        slope = np.exp(x["A_log"][h])
        z = g + x["dt_bias"][h * len(g) : (h + 1) * len(g)]
        bound = settings.get("lower_bound")
        if bound is None:
            g = -slope * np.log1p(np.exp(z))
        else:
            g = bound / (1 + np.exp(-slope * z))
    if settings.get("use_beta_sigmoid"):
        beta = (2 if settings.get("allow_neg_eigval") else 1) / (1 + np.exp(-beta))
    return q, k, v, g, beta


def cotangents(time: int = T) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a loss by o and by the final state."""
    return draw(10, B, time, HV, V), draw(11, B, HV, K, V)


@cache
def _compiled(with_gradients: bool, settings: tuple):
    def forward(x, segment_ids):
        tensors = [x[name] for name in INPUTS[:5]]
        rest = {name: x[name] for name in INPUTS[5:] if name in x}
        return kda(
            *tensors,
            **rest,
            segment_ids=segment_ids,
            output_final_state=True,
            **dict(settings),
        )

    def everything(x, segment_ids, out):
        (o, state), vjp = jax.vjp(lambda x: forward(x, segment_ids), x)
        do, dstate = out
        (grads,) = vjp((do.astype(o.dtype), dstate.astype(state.dtype)))
        named = {f"d{name}": gradient for name, gradient in grads.items()}
        return {"o": o, "state": state, **named}

    return jit(everything if with_gradients else forward)


def jit(function, **options):
    """jax.jit for programs that run once on tiny shapes: compiles in half the time."""
    fast = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=fast, **options)


def run(x, segment_ids=None, out=None, dtype="float64", gradients=True, **settings):
    """Returns o, state and the gradients of all inputs, as float64 numpy arrays.

    Args:
      x: arrays of `raw` or `prepared`.
      segment_ids: [B,T] or None.
      out: gradients by o and by the final state; None means `cotangents`.
      dtype: of all inputs but the state.
      gradients: whether to compute them.
      **settings: of `kda`.
    """
    wide = _wide(dtype)
    with jax.enable_x64(dtype == "float64"):
        x = {
            name: jnp.asarray(value, wide if name == "initial_state" else dtype)
            for name, value in x.items()
        }
        ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        function = _compiled(gradients, tuple(sorted(settings.items())))
        if gradients:
            out = cotangents(x["v"].shape[1]) if out is None else out
            out = tuple(jnp.asarray(value, wide) for value in out)
            results = function(x, ids, out)
        else:
            results = dict(zip(("o", "state"), function(x, ids), strict=True))
        return {name: np.asarray(value, np.float64) for name, value in results.items()}


def rounded(x: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The values that inputs of a dtype really hold, in float64; states are wide."""
    with jax.enable_x64(True):
        return {
            name: np.asarray(
                jnp.asarray(value, _wide(dtype) if "state" in name else dtype),
                np.float64,
            )
            for name, value in x.items()
        }


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def errors(got: dict, expected: dict) -> dict[str, float]:
    """Largest error of each array, relative to the largest entry expected."""
    assert got.keys() == expected.keys()
    return {
        name: float(np.abs(got[name] - x).max() / max(np.abs(x).max(), 1e-30))
        for name, x in expected.items()
    }


def assert_close(got: dict, expected: dict, tolerance: float) -> None:
    """Fails with every error that is not below the tolerance."""
    large = {
        name: error
        for name, error in errors(got, expected).items()
        if not error < tolerance
    }
    assert not large, f"relative errors {large}, tolerance {tolerance}"


def compare(
    implementation, x, ids=None, dtype="float32", tolerance=None, **settings
) -> None:
    """Fails unless fused kernels agree with the recurrence in float64.

    In the norm, within 1e-5 for float32 and 5e-3 for bfloat16, or the tolerance.
    """
    time = x["v"].shape[1]
    do, dstate = cotangents(time)
    out = rounded({"o": do}, dtype)["o"], dstate
    got = run(x, ids, out, dtype, implementation=implementation, **settings)
    settings.pop("chunk_size", None)
    wide = rounded(x, dtype)
    expected = run(wide, ids, out, implementation="reference", **settings)
    errors = {
        name: np.linalg.norm(got[name] - y) / max(np.linalg.norm(y), 1e-30)
        for name, y in expected.items()
    }
    limit = tolerance or {"float32": 1e-5, "bfloat16": 5e-3}[dtype]
    # Sums over all tokens, in which rounding of different signs does not cancel.
    limits = {"dA_log": 4 * limit, "ddt_bias": 4 * limit}
    # The difference of two products with dR, which is kept in the inputs' dtype.
    limits["dbeta"] = 1.5 * limit
    if not np.any(x["g"] > -5.0):
        # dG adds terms of order 1 that cancel but for exp(-5).
        limits["dg"] = 4 * limit
    large = {n: float(e) for n, e in errors.items() if not e < limits.get(n, limit)}
    assert not large, f"relative errors {large}, tolerance {limit}"
