"""Root-mean-square normalisation over the last axis, plain and gated.

Statistics are taken in float32 or wider whatever the input is: a bfloat16 mean of
squares over a model width loses the digits that keep residual streams comparable
across depth. Results return in the input's dtype.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, gain_D: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis.

    Args:
      x: [..., D].
      gain_D: [D], or None for no learned gain.
      eps: added to the mean square, inside the root.

    Returns:
      [..., D] in x.dtype.

    Raises:
      ValueError: the gain does not match the last axis of x.
    """
    return _normalise(x, gain_D, eps).astype(x.dtype)


def gated_rms_norm(
    x_BTHV: Array, gate_BTHV: Array | None, gain_V: Array | None, eps: float
) -> Array:
    """rms_norm(x) * gain * sigmoid(gate): what leaves a KDA head.

    Norm, gain and gate are applied in float32 or wider and rounded once.
    Source: Kimi K3 report, Eq. 6.

    Args:
      x_BTHV: [..., V] read-out of the recurrent state.
      gate_BTHV: pre-sigmoid gate of x's shape, or None for no gate.
      gain_V: [V], shared by all heads, or None.
      eps: added to the mean square, inside the root.

    Returns:
      [..., V] in x.dtype.

    Raises:
      ValueError: gate or gain do not match x.
    """
    y = _normalise(x_BTHV, gain_V, eps)
    if gate_BTHV is not None:
        if gate_BTHV.shape != x_BTHV.shape:
            raise ValueError(
                f"gate has shape {gate_BTHV.shape}, expected x's {x_BTHV.shape}; "
                "project the gate to one value per channel of x"
            )
        y = y * jax.nn.sigmoid(gate_BTHV.astype(y.dtype))
    return y.astype(x_BTHV.dtype)


def _normalise(x: Array, gain_D: Array | None, eps: float) -> Array:
    if gain_D is not None and gain_D.shape != x.shape[-1:]:
        raise ValueError(
            f"gain has shape {gain_D.shape}, expected {x.shape[-1:]} for x of shape "
            f"{x.shape}; the norm runs over the last axis"
        )
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return y if gain_D is None else y * gain_D.astype(y.dtype)
