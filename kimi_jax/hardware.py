"""What devices can do: one row each, by the `device_kind` that JAX reports."""

from __future__ import annotations

import math
from typing import NamedTuple


class Device(NamedTuple):
    """One JAX device; a tpu7x chip is two."""

    flops: float  # dense bfloat16 FLOPs a second
    memory: int  # bytes that a program may use
    bandwidth: float  # bytes a second, of that memory
    link: float  # bytes a second that it can send to others of its slice, all links


_GIB = 2**30

# cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; links are the published bits a
# second of a chip, which count both directions, over 16.
TPU_V4 = Device(275e12, 32 * _GIB, 1.2e12, 2400e9 / 16)
TPU_V5E = Device(197e12, 16 * _GIB, 819e9, 1600e9 / 16)
TPU_V5P = Device(459e12, 95 * _GIB, 2765e9, 4800e9 / 16)
TPU_V6E = Device(918e12, 32 * _GIB, 1640e9, 3584e9 / 16)
TPU_7X = Device(1153.5e12, 96 * _GIB, 3690e9, 9600e9 / 32)
# NVIDIA data sheets; their tables for tensor cores are with sparsity, twice these.
H100 = Device(989.5e12, 80 * _GIB, 3350e9, 450e9)
H100_NVL = Device(835.5e12, 94 * 10**9, 3900e9, 300e9)
H100_PCIE = Device(756.5e12, 80 * _GIB, 2000e9, 64e9)
H200 = Device(989.5e12, 141 * 10**9, 4800e9, 450e9)
H200_NVL = Device(835.5e12, 141 * 10**9, 4800e9, 450e9)
B200 = Device(2250e12, 180 * 10**9, 7700e9, 900e9)

DEVICES: dict[str, Device] = {
    "TPU v4": TPU_V4,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v5p": TPU_V5P,
    "TPU v6 lite": TPU_V6E,
    "TPU v6e": TPU_V6E,
    "TPU7x": TPU_7X,
    "NVIDIA H100": H100,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H200": H200,
    "NVIDIA H200 NVL": H200_NVL,
    "NVIDIA B200": B200,
}

# Device kinds by the generation in a topology's name, "v5p" in "v5p:4x4x4".
GENERATIONS = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}
GENERATIONS["tpu7x"] = "TPU7x"

# Slices that can be rented, from the same pages: chips along the sides of the torus.
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SLICES = {
    **dict.fromkeys(("v4", "v5p", "tpu7x"), _CUBES),
    **dict.fromkeys(("v5e", "v6e"), _SQUARES),
}


def smallest_slice(generation: str, devices: int) -> str | None:
    """The name of a topology with so many JAX devices; None: there is none."""
    each = 2 if generation == "tpu7x" else 1
    for shape in SLICES[generation]:
        if each * math.prod(map(int, shape.split("x"))) >= devices:
            return f"{generation}:{shape}"
    return None


def look_up(device_kind: str) -> Device | None:
    """The row of a device kind; None if it is not in the table, as for a CPU."""
    if device_kind.startswith("TPU"):
        return DEVICES.get(device_kind)
    # As "NVIDIA H100 80GB HBM3".
    known = [name for name in DEVICES if f"{device_kind} ".startswith(f"{name} ")]
    return DEVICES[max(known, key=len)] if known else None


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOPs a second of a device; None where the table has none."""
    device = look_up(device_kind)
    return None if device is None else device.flops
