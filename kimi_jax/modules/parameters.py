"""How modules declare matrices and gains, record statistics, and draw first values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax.modules import statistics

Initializer = jax.nn.initializers.Initializer


def matrix(
    module: nn.Module, name: str, shape: Sequence[int], std: float, dtype: str
) -> jax.Array:
    """Parameter `name`, drawn from N(0, std^2), kept in float32 and read in `dtype`."""
    init = jax.nn.initializers.normal(std)
    return module.param(name, init, tuple(shape), jnp.float32).astype(dtype)


def gain(module: nn.Module, name: str, size: int) -> jax.Array:
    """A normalisation gain of ones, in float32."""
    return module.param(name, jax.nn.initializers.ones, (size,), jnp.float32)


def observing(module: nn.Module) -> bool:
    """Whether statistics are wanted; evaluation wants none and pays for none."""
    return module.is_mutable_collection("stats")


def sow_stat(module: nn.Module, name: str, value: jax.Array) -> None:
    """Record a statistic of the table in `statistics`: stacked by scans."""
    statistics.reduction(name)
    module.sow("stats", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def sow_stats(module: nn.Module, values: Mapping[str, jax.Array]) -> None:
    """`sow_stat` of each."""
    for name, value in values.items():
        sow_stat(module, name, value)


def conv_uniform(key: jax.Array, shape: Sequence[int], dtype=jnp.float32) -> jax.Array:
    """U(-1/sqrt(W), 1/sqrt(W)) for a depthwise kernel [..., W] with W taps."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)


def fan_in_uniform(
    key: jax.Array, shape: Sequence[int], dtype=jnp.float32
) -> jax.Array:
    """U(-1/sqrt(D), 1/sqrt(D)) for a matrix [D, E]: the released router's draw."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)


def inverse_softplus_dt(
    key: jax.Array, shape: Sequence[int], dtype=jnp.float32
) -> jax.Array:
    """softplus^-1(dt) with dt log-uniform in [1e-3, 1e-1], as in Mamba-2.

    With `A_log` = 0 the bounded gate then starts between -0.48 and -0.005 nats a token.
    Zeros would start it at -2.5, which forgets everything within two tokens.
    """
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    dt = jnp.exp(jax.random.uniform(key, tuple(shape), dtype, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))


def log_uniform_decay(
    key: jax.Array, shape: Sequence[int], dtype=jnp.float32
) -> jax.Array:
    """log A with A ~ U(1, 16): the unbounded gate's draw."""
    return jnp.log(jax.random.uniform(key, tuple(shape), dtype, 1.0, 16.0))
