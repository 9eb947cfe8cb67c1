"""Eight simulated CPU devices for every test, set before JAX starts.

Tests compile far more than they compute, so LLVM's optimiser is off: it would take most
of the time and changes no result beyond rounding.
"""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)
