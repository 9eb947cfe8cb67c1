"""What GPUs ran, as a profile tells."""

import jax.numpy as jnp

from experiments import gpu_trace


def test_time_in_which_something_runs_is_counted_once():
    kernels = [("b", (5.0, 12.0)), ("a", (0.0, 10.0)), ("c", (20.0, 21.0))]
    assert gpu_trace.busy(kernels) == 13.0
    assert gpu_trace.busy([]) == 0.0


def test_a_machine_without_gpus_has_no_traces():
    result, devices = gpu_trace.trace(lambda: jnp.ones(3))
    assert devices == []
    assert result.tolist() == [1.0, 1.0, 1.0]
