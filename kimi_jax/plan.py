"""Will it fit, and how fast could it be: an optimizer step, compiled and not run.

The real step of a config is compiled for the devices of a mesh, which need not exist
(`kimi_jax.topology`). The compiler then tells memory and collectives; arithmetic comes
from `kimi_jax.flops`, because XLA counts the body of a loop once.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from kimi_jax import accounting, canonical, flops, hardware, hlo, sharding, temporaries
from kimi_jax.config import Config
from kimi_jax.train.program import PRE_TRAINING, Program, lower_step, state_shape
from kimi_jax.train.step import State, make_transform

# Forward, backward (twice the forward), and what remat makes the forward repeat.
_PASSES = {"none": 3, "unit": 4, "block": 4, "nested": 5}


EFFORTS = ("O0", "O1", "O2", "O3")  # XLA's optimization levels
# The TPU compiler's words: all that a device needs, and what it has.
_REFUSED = re.compile(r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)")


class Share(NamedTuple):
    """Bytes on one device of one part of the model."""

    name: str
    parameters: int
    optimizer: int


class Memory(NamedTuple):
    """Bytes on one device, from the compiler."""

    arguments: int  # the state and a batch; the step updates the state in place
    temporaries: int  # activations, gradients, gathered parameters
    program: int
    offloaded: int  # temporaries in the host's memory
    limit: int | None  # None: not known for this device

    @property
    def used(self) -> int:
        return self.arguments + self.temporaries + self.program

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.used <= self.limit


class Roofline(NamedTuple):
    """Least seconds of a step, by what they are spent on; the largest is the bound."""

    arithmetic: float  # FLOPs of the model, and of what remat repeats
    memory: float  # reading weights and updating the state; activations left out
    links: float  # collectives, as if over all links of a device at once

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return max(self._fields, key=lambda name: getattr(self, name))


class Plan(NamedTuple):
    """What compiling a step for a mesh told."""

    devices: int
    device_kind: str
    mesh: dict[str, int]
    shares: list[Share]
    memory: Memory
    parts: temporaries.Parts  # of the temporaries
    collectives: dict[str, hlo.Collective] | None  # None: the compiler gave up
    flops: float  # of the model, for one step on all devices
    roofline: Roofline | None  # None: no collectives, or not in the hardware table
    utilisation: float | None  # model FLOPs, at the roofline's time, of the peak
    lower_seconds: float
    compile_seconds: float
    host_memory: int  # largest that the process ever was, in bytes


def make_plan(
    cfg: Config,
    mesh: Mesh,
    program: Program = PRE_TRAINING,
    *,
    effort: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Compile a step of `cfg` for `mesh`; nothing is allocated on a device.

    Args:
      program: whose step; another is `rl.program.LEARNER`.
      effort: of the compiler, one of `EFFORTS`; None: as for a run.
      say: is told what begins; compiling a large model takes minutes.
    """
    started = time.monotonic()
    transform = make_transform(cfg)
    state = state_shape(cfg, mesh, transform)
    parts = temporaries.parts_of(program, cfg, mesh, state)
    lowered = lower_step(program, cfg, mesh, transform, state)
    lowered_at = time.monotonic()
    devices = "1 device" if mesh.size == 1 else f"{mesh.size:,} devices"
    say(f"traced in {lowered_at - started:.0f} s; compiling for {devices}")
    kept = shares(cfg, state)
    device = mesh.devices.flat[0]
    row = hardware.look_up(device.device_kind)
    arguments = sum(share.parameters + share.optimizer for share in kept)
    memory, traffic = compile_lowered(lowered, arguments, row, effort)
    done = time.monotonic()
    total = flops.step_flops(cfg)
    roofline = utilisation = None
    if row is not None and traffic is not None:
        moved = _state_and_weight_bytes(cfg, mesh, state, kept)
        roofline = _roofline(cfg, mesh, row, traffic, total, moved)
        utilisation = total / (roofline.seconds * row.flops * mesh.size)
    return Plan(
        mesh.size,
        device.device_kind,
        dict(mesh.shape),
        kept,
        memory,
        parts,
        traffic,
        total,
        roofline,
        utilisation,
        lowered_at - started,
        done - lowered_at,
        # Linux counts in KiB, macOS in bytes.
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    )


def compile_lowered(
    lowered: Any, arguments: int, row: hardware.Device | None, effort: str | None
) -> tuple[Memory, dict[str, hlo.Collective] | None]:
    """Memory and collectives; None for these if the compiler says it cannot fit.

    Args:
      arguments: bytes that a device is given; all else is then called temporary.
      effort: as in `make_plan`.
    """
    options = {} if effort is None else {"optimization_level": effort}
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        used, limit = (int(float(n) * 2**30) for n in refused.groups())
        return Memory(arguments, used - arguments, 0, 0, limit), None
    return memory_of(compiled, row), hlo.collective_bytes(compiled.as_text())


def memory_of(compiled: Any, row: hardware.Device | None) -> Memory:
    """What the compiler says that a program takes on one device."""
    stats = compiled.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        stats.host_temp_size_in_bytes,
        None if row is None else row.memory,
    )


def shares(cfg: Config, state: State) -> list[Share]:
    """What each part of the model keeps on one device between steps.

    `state` is a training state on its mesh, or its `state_shape`.
    """
    found: dict[str, list[int]] = {}
    for which, tree in enumerate((state.params, state.optimizer)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            part = accounting.part_of(canonical.path_name(path)) if leaf.ndim else ""
            found.setdefault(part, [0, 0])[which] += sharding.local_bytes(leaf)
    order = [part.name for part in accounting.parameter_parts(cfg.model)]
    return [Share(name, *found[name]) for name in order]


def _roofline(
    cfg: Config,
    mesh: Mesh,
    row: hardware.Device,
    traffic: dict[str, hlo.Collective],
    total: float,
    moved: float,
) -> Roofline:
    return Roofline(
        total * _PASSES[cfg.train.remat] / 3 / (row.flops * mesh.size),
        moved / row.bandwidth,
        sum(kind.sent_bytes for kind in traffic.values()) / row.link,
    )


def _state_and_weight_bytes(
    cfg: Config, mesh: Mesh, state: State, kept: list[Share]
) -> float:
    """Bytes of weights that a device reads in a step, and of state that it rewrites."""
    width = jax.numpy.dtype(cfg.model.dtype).itemsize
    weights = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        axes = sharding.split_axes(sharding.parameter_spec(path, leaf, in_use=True))
        weights += leaf.size * width // math.prod(mesh.shape[axis] for axis in axes)
    passes = _PASSES[cfg.train.remat] * cfg.train.micro_batches
    return 2 * sum(s.parameters + s.optimizer for s in kept) + passes * weights


def advice(cfg: Config, plan: Plan) -> list[str]:
    """Changes that would make a plan fit, the most promising first."""
    memory, mesh = plan.memory, plan.mesh
    if memory.fits is not False:
        return []
    limit = memory.limit or 0
    found = []
    if memory.arguments > limit / 2:
        axis = "expert" if _most(plan) == "routed experts" else "fsdp"
        found.append(
            f"parameters and optimizer take {size_text(memory.arguments)}: raise "
            f"--config.mesh.{axis} above {mesh[axis]}, or use a larger slice"
        )
        if cfg.optimizer.momentum_dtype == "float32":
            found.append("halve momenta: --config.optimizer.momentum_dtype=bfloat16")
    rows = cfg.train.batch_size // cfg.train.micro_batches
    split = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    if rows > split:
        more = cfg.train.micro_batches * (rows // split)
        found.append(f"one row a device at a time: --config.train.micro_batches={more}")
    if cfg.train.remat != "nested":
        found.append("keep less for the backward pass: --config.train.remat=nested")
    if rows <= split or cfg.train.seq_len > 32768:
        found.append(f"split time: raise --config.mesh.context above {mesh['context']}")
    return found


def _most(plan: Plan) -> str:
    return max(plan.shares, key=lambda share: share.parameters + share.optimizer).name


def size_text(size: float) -> str:
    unit = "KiB" if size < 2**20 else "MiB" if size < 2**30 else "GiB"
    return f"{size / {'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30}[unit]:,.1f} {unit}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def rows(cfg: Config, plan: Plan) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """The plan as titled tables."""
    kept: list[tuple[Any, ...]] = [("part", "parameters", "optimizer")]
    kept += [
        (s.name, size_text(s.parameters), size_text(s.optimizer)) for s in plan.shares
    ]
    kept.append(
        (
            "all",
            size_text(sum(s.parameters for s in plan.shares)),
            size_text(sum(s.optimizer for s in plan.shares)),
        )
    )
    return [
        ("kept on a device between steps", kept),
        ("memory of a device", _step_memory_rows(plan)),
        ("collectives", collective_rows(plan.collectives or {})),
        ("time", _time_rows(cfg, plan)),
    ]


def memory_rows(memory: Memory, arguments: str) -> list[tuple[Any, ...]]:
    """The memory as a table; `arguments` says what the program is given."""
    fits = {None: "limit unknown", True: "fits", False: "DOES NOT FIT"}[memory.fits]
    limit = "" if memory.limit is None else f" of {size_text(memory.limit)}"
    return [
        (arguments, size_text(memory.arguments)),
        ("temporaries", size_text(memory.temporaries)),
        ("program", size_text(memory.program)),
        ("all", f"{size_text(memory.used)}{limit}: {fits}"),
        ("offloaded to the host", size_text(memory.offloaded)),
    ]


def _step_memory_rows(plan: Plan) -> list[tuple[Any, ...]]:
    """`memory_rows`, with what the temporaries are made of below them."""
    parts = plan.parts
    rest = plan.memory.temporaries - sum(parts)
    # Without remat the compiler may compute again what JAX hands to the backward pass.
    left = size_text(rest) if rest >= 0 else "none left: it keeps less than JAX offers"
    given, temporary, *others = memory_rows(plan.memory, "state and batch")
    return [
        given,
        temporary,
        ("- activations for the backward pass, at most", size_text(parts.activations)),
        ("- gradients, summed over micro-batches", size_text(parts.gradients)),
        ("- work in progress: the rest", left),
        *others,
    ]


def collective_rows(traffic: dict[str, hlo.Collective]) -> list[tuple[Any, ...]]:
    """The collectives as a table."""
    if not traffic:
        return [("none", "", "")]
    sent: list[tuple[Any, ...]] = [("kind", "times a step", "sent by a device")]
    return sent + [(k, _times(t), size_text(t.sent_bytes)) for k, t in traffic.items()]


def _times(collective: hlo.Collective) -> str:
    return f"{'' if collective.exact else 'at least '}{collective.runs:,}"


def _time_rows(cfg: Config, plan: Plan) -> list[tuple[str, str]]:
    tokens = cfg.train.batch_size * cfg.train.seq_len
    found = [
        ("tokens a step", f"{tokens:,}"),
        ("model FLOPs a step", f"{plan.flops:.3e}"),
        (
            "compiled in",
            f"{plan.lower_seconds:.0f} s + {plan.compile_seconds:.0f} s, "
            f"with {size_text(plan.host_memory)} of memory",
        ),
    ]
    line = plan.roofline
    if line is None or plan.utilisation is None:
        return found
    return [
        *found,
        ("arithmetic, at least", seconds_text(line.arithmetic)),
        ("memory, at least", seconds_text(line.memory)),
        ("links, at least", seconds_text(line.links)),
        (
            "a step, at least",
            f"{seconds_text(line.seconds)}, bound by {line.bound}; "
            f"{plan.utilisation:.0%} of peak, {tokens / line.seconds:,.0f} tokens/s",
        ),
    ]


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything in the plan, for programs."""
    values = plan._asdict()
    values["shares"] = [share._asdict() for share in plan.shares]
    values["parts"] = plan.parts._asdict()
    values["memory"] = plan.memory._asdict() | {
        "used": plan.memory.used,
        "fits": plan.memory.fits,
    }
    if plan.collectives is not None:
        values["collectives"] = {k: t._asdict() for k, t in plan.collectives.items()}
    if plan.roofline is not None:
        values["roofline"] = plan.roofline._asdict() | {
            "seconds": plan.roofline.seconds,
            "bound": plan.roofline.bound,
        }
    return values
