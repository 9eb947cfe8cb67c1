"""Will it fit, and how fast could it be: reading or decoding, compiled and not run.

As `kimi_jax.plan` does for a train step. Decoding is bound by what it reads: the least
time of a step is the weights and the cache of a device over its bandwidth.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from kimi_jax import hardware, hlo, plan, sharding
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.infer.program import lower_decode, lower_read, variables_shape
from kimi_jax.modules.cache import cache_bytes, cache_shape


class Plan(NamedTuple):
    """What compiling a program for a mesh told."""

    program: str  # "prefill" or "decode"
    slots: int
    length: int
    devices: int
    device_kind: str
    mesh: dict[str, int]
    weights: int  # bytes on one device
    cache: dict[str, int]  # bytes on one device, by part
    memory: plan.Memory
    collectives: dict[str, hlo.Collective] | None  # None: the compiler gave up
    least_seconds: float | None  # reading weights and cache once; None: unknown device
    compile_seconds: float


def make_plan(
    cfg: Config,
    mesh: Mesh,
    program: str,
    *,
    slots: int,
    length: int,
    chunk: int,
    effort: str | None = None,
) -> Plan:
    """Compile `program` for `mesh`; nothing is allocated on a device.

    Args:
      chunk: tokens of a row that are read in one call of "prefill".
      effort: of the compiler, one of `plan.EFFORTS`; None: as for a run.

    Raises:
      UserError: the mesh does not divide the cache.
    """
    started = time.monotonic()
    try:
        shape = cache_shape(cfg.model, slots, length, mesh=mesh)
    except ValueError as error:
        raise UserError(str(error).replace("batch=", "--slots=")) from error
    if program == "decode":
        lowered = lower_decode(cfg, mesh, slots, length)
    else:
        lowered = lower_read(cfg, mesh, slots, length, chunk)
    device = mesh.devices.flat[0]
    row = hardware.look_up(device.device_kind)
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), shape
    )
    kept = cache_bytes(local)
    weights = sharding.local_bytes(variables_shape(cfg.model, mesh))
    given = weights + sum(kept.values())
    memory, traffic = plan.compile_lowered(lowered, given, row, effort)
    return Plan(
        program,
        slots,
        length,
        mesh.size,
        device.device_kind,
        dict(mesh.shape),
        weights,
        kept,
        memory,
        traffic,
        None if row is None else given / row.bandwidth,
        time.monotonic() - started,
    )


def rows(made: Plan) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """The plan as titled tables."""
    size = plan.size_text
    kept = [("weights", size(made.weights))]
    kept += [(name, size(amount)) for name, amount in made.cache.items()]
    timed = [
        ("sequences", f"{made.slots:,} of up to {made.length:,} tokens"),
        ("compiled in", f"{made.compile_seconds:.0f} s"),
    ]
    if made.least_seconds is not None and made.program == "decode":
        rate = made.slots / made.least_seconds
        timed.append(
            (
                "a step, at least",
                f"{plan.seconds_text(made.least_seconds)}: every weight and the whole "
                f"cache read once; {rate:,.0f} tokens/s",
            )
        )
    return [
        ("kept on a device", kept),
        ("memory of a device", plan.memory_rows(made.memory, "weights and cache")),
        ("collectives", plan.collective_rows(made.collectives or {})),
        ("time", timed),
    ]


def to_json(made: Plan) -> dict[str, Any]:
    """Everything in the plan, for programs."""
    memory = {**made.memory._asdict(), "used": made.memory.used}
    values = made._asdict() | {"memory": memory | {"fits": made.memory.fits}}
    if made.collectives is not None:
        values["collectives"] = {k: t._asdict() for k, t in made.collectives.items()}
    return values
