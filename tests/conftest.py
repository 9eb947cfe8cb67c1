"""Eight simulated CPU devices for every test, set before JAX starts.

Tests compile far more than they compute, so LLVM's optimiser is off: it would take most
of the time and changes no result beyond rounding. Programs that several tests share,
in this process or another, are compiled once.
"""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Triton decides as it is imported, and whichever test comes first imports it.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)


def pytest_configure(config):
    """A compilation cache for the workers of this run, gone with it."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="kimi_jax_compiled_")
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
