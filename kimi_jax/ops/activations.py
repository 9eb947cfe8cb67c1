"""Gated activations of the feed-forward layers.

SiTU caps both branches of a gated linear unit with a tanh, so that an outlier
cannot grow with the square (with four chained matmuls: the fourth power) of its
input. Near zero it equals SwiGLU to second order, and it becomes SwiGLU as both
caps grow.
"""

import jax
import jax.numpy as jnp
from jax import Array


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """SiTU-GLU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    The result is bounded by beta * linear_beta (100 with K3's 4 and 25). Computed in
    float32 or wider, rounded once. Source: Kimi K3 report, Stable LatentMoE.

    Args:
      gate: the branch under the sigmoid, any shape.
      up: the linear branch, same shape.
      beta: cap of the gate branch, > 0.
      linear_beta: cap of the linear branch, > 0.

    Returns:
      gate's shape and dtype.

    Raises:
      ValueError: shapes differ, or a cap is not positive.
    """
    _check_branches(gate, up)
    if not (beta > 0 and linear_beta > 0):
        raise ValueError(
            f"situ caps are beta={beta}, linear_beta={linear_beta}, expected both > 0; "
            "use swiglu for no caps"
        )
    g, u = _widen(gate), _widen(up)
    capped_gate = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)
    return (capped_gate * (linear_beta * jnp.tanh(u / linear_beta))).astype(gate.dtype)


def swiglu(gate: Array, up: Array) -> Array:
    """SwiGLU: gate * sigmoid(gate) * up, in float32 or wider, rounded once.

    Args:
      gate: the branch under the sigmoid, any shape.
      up: the linear branch, same shape.

    Returns:
      gate's shape and dtype.

    Raises:
      ValueError: shapes differ.
    """
    _check_branches(gate, up)
    return (jax.nn.silu(_widen(gate)) * _widen(up)).astype(gate.dtype)


def largest(hidden: Array, used: Array | None = None) -> Array:
    """The largest magnitude in `hidden`, a scalar in its dtype, without gradient.

    NaN wins.

    Args:
      hidden: any shape.
      used: bool, broadcastable to `hidden`; what is False does not count. None: all do.
    """
    magnitude = jnp.abs(jax.lax.stop_gradient(hidden))
    if used is not None:
        magnitude = jnp.where(used, magnitude, 0)
    return jnp.max(magnitude, initial=0)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _check_branches(gate: Array, up: Array) -> None:
    if gate.shape != up.shape:
        raise ValueError(
            f"gate has shape {gate.shape} and up {up.shape}, expected equal shapes; "
            "give both projections the same width"
        )
