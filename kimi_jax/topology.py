"""Devices to plan for: those present, or those of a TPU slice that is not there.

XLA's TPU compiler runs on any x86 machine with libtpu installed: it needs the shape of
the slice and no TPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from kimi_jax import hardware
from kimi_jax.errors import UserError

_NAME = re.compile(r"(?P<generation>\w+):(?P<shape>\d+(x\d+){1,2})")


def devices(topology: str) -> Sequence[Any]:
    """The devices of `topology`, such as "v5p:4x4x4"; "" is this machine's.

    Raises:
      UserError: an unknown name or shape, or libtpu is missing.
    """
    if not topology:
        return jax.devices()
    match = _NAME.fullmatch(topology)
    known = ", ".join(hardware.GENERATIONS)
    if match is None or match["generation"] not in hardware.GENERATIONS:
        raise UserError(
            f"--topology={topology}: write GENERATION:SHAPE with a generation of "
            f"{known}, such as v5p:4x4x4 or v6e:16x16"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology={topology}: the TPU compiler is not installed; run "
            "`pip install -e .[tpu]` (no TPU is needed)"
        )
    # libtpu asks a metadata server and locks a file; there is neither here.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        raise UserError(
            f"--topology={topology}: the TPU compiler refuses it ({_first(error)}); "
            "v4, v5p and tpu7x have three sides, multiples of 4 above 4 (2x2x1, 4x4x4, "
            "8x8x16); v5e and v6e have two (2x2, 4x8, 16x16)"
        ) from error
    return list(found.devices)


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
