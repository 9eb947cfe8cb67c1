"""The devices that programs are made for."""

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu"; a mesh that is set may be of devices elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
