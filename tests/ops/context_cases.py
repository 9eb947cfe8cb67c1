"""Time split over simulated devices, and values with gradients of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXIS = "context"
SPLIT, SAME = P(None, AXIS), P()


def over(ranks, f, in_specs, out_specs, **options):
    """f of a piece of time -> f of the whole time, on that many devices."""
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
    )


def with_gradients(f):
    """(inputs, *constants) -> the results of f, and gradients by the inputs."""

    @jax.jit
    def run(inputs, *constants):
        results, pull = jax.vjp(lambda inputs: f(inputs, *constants), inputs)
        waves = jax.tree.map(
            lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),
            results,
        )
        return results, pull(waves)[0]

    return run


def assert_close(got, expected, tolerance):
    """Largest error of each array against its largest entry."""
    errors = jax.tree.map(_error, jax.device_get(got), jax.device_get(expected))
    bad = [e for e in jax.tree.leaves_with_path(errors) if not e[1] < tolerance]
    assert not bad, f"relative errors {bad}, tolerance {tolerance}"


def _error(x, y):
    assert x.shape == y.shape and x.dtype == y.dtype
    return float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
