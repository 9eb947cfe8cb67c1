"""A whole train step on several devices: time, memory beside the plan, overlap."""

import statistics
import time
from collections.abc import Iterable, Iterator
from concurrent import futures
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import bench_generation, gpu_trace, multi_gpu_checks
from experiments.gpu_trace import Span, merged, shared
from experiments.multi_gpu_turns import Turns
from kimi_jax import flops, hardware, hlo, plan, sharding
from kimi_jax.config import Config
from kimi_jax.train.program import PRE_TRAINING, compile_fast, lower_step, state_shape
from kimi_jax.train.step import init_state, make_transform


class Program(NamedTuple):
    """A step for a mesh under some compiler flags, being compiled."""

    cfg: Config
    mesh: Mesh
    init: futures.Future
    flags: str
    job: futures.Future


def steps(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """One row for each mesh and set of flags, then what they gained, then traces.

    The peak of memory only ever rises, so meshes are run in the order of what they
    need, one device last, and a peak is told where it rose.
    """
    programs = list(begin(config))
    memory = {id(p): plan.memory_of(p.job.result(), _row(p)) for p in programs}
    programs.sort(key=lambda p: (p.mesh.size == 1, memory[id(p)].used))
    turns.alone()
    texts = dict.fromkeys(sharding.describe(p.mesh) for p in programs)
    meshes = {t: [p for p in programs if sharding.describe(p.mesh) == t] for t in texts}
    rows = []
    for mine in meshes.values():
        for row in run(mine, memory, config):
            rows.append(row)
            yield row
    alone = [row["ms"] for row in rows if row["implementation"] == "one device"]
    for row in rows if alone else ():
        names = {name: row[name] for name in ("case", "implementation")}
        yield names | {"speedup": alone[0] / row["ms"]}
    for text, mine in meshes.items():
        if config.trace and text != "one device":
            yield from traces(mine)


def begin(config: ConfigDict) -> Iterator[Program]:
    """Lowers every program, and leaves compiling to threads."""
    # Several processes must compile in one order.
    workers = 1 if jax.process_count() > 1 else 32
    with futures.ThreadPoolExecutor(workers) as pool:
        for text, names in config.step_meshes.items():
            if multi_gpu_checks.too_small(text, jax.device_count()):
                continue
            cfg, mesh = multi_gpu_checks.on_mesh(config.step_model, text)
            transform = make_transform(cfg)
            shapes = state_shape(cfg, mesh, transform)
            where = jax.tree.map(lambda x: x.sharding, shapes)
            made = jax.jit(partial(init_state, cfg, transform), out_shardings=where)
            init = pool.submit(made.lower().compile, compile_fast(mesh))
            lowered = lower_step(PRE_TRAINING, cfg, mesh, transform, shapes)
            for name in names:
                options = dict(config.step_flags[name])
                job = pool.submit(lowered.compile, compiler_options=options)
                yield Program(cfg, mesh, init, name, job)


def _row(program: Program) -> hardware.Device | None:
    return hardware.look_up(program.mesh.devices.flat[0].device_kind)


def run(programs: list[Program], memory: dict, config: ConfigDict) -> Iterator[dict]:
    """Rows of one mesh: a step under each set of flags, on one state."""
    cfg, mesh = programs[0].cfg, programs[0].mesh
    before = bench_generation.device_peak(mesh.local_devices)
    state, batch, go = start(programs[0])
    for program in programs:
        compiled, times = program.job.result(), []
        for _ in range(config.rounds + 2):
            started = time.perf_counter()
            state, metrics = compiled(state, batch, go)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times[2:])
        device = _row(program)
        row = {
            "case": f"step, {program.flags}",
            "implementation": sharding.describe(mesh),
            "ms": 1e3 * seconds,
            "loss": float(metrics["loss"]),
            "plan GB": memory[id(program)].used / 1e9,
        }
        if device is not None:
            per_device = flops.step_flops(cfg) / mesh.size
            row["utilisation"] = per_device / seconds / device.flops
        after = bench_generation.device_peak(mesh.local_devices)
        if after > before:
            row["peak GB"] = before = after
        traffic = hlo.collective_bytes(compiled.as_text())
        row["sent GB"] = sum(kind.sent_bytes for kind in traffic.values()) / 1e9
        yield row


def start(program: Program) -> tuple[Any, Any, Any]:
    """What a step is given: a fresh state, a batch, and that it shall go."""
    batch = jax.device_put(
        multi_gpu_checks.draw_batch(program.cfg, 0),
        sharding.batch_sharding(program.mesh),
    )
    go = jax.device_put(np.True_, sharding.replicated(program.mesh))
    return program.init.result()(), batch, go


def traces(programs: list[Program]) -> Iterator[dict]:
    """How much of the collectives each set of flags hides, on one mesh."""
    state, batch, go = start(programs[0])
    for program in programs:
        compiled = program.job.result()
        state, _ = jax.block_until_ready(compiled(state, batch, go))
        (state, _), devices = gpu_trace.trace(partial(compiled, state, batch, go))
        found = [overlap(kernels) for kernels in devices]
        row = {
            "case": f"trace, {program.flags}",
            "implementation": sharding.describe(program.mesh),
        }
        yield row | (found[0] if found else {})


def overlap(events: Iterable[tuple[str, Span]]) -> dict[str, Any]:
    """Milliseconds of collectives, and the share during which something else ran.

    A collective counts from its first kernel, so waiting for the others is in it.
    """
    wire: list[Span] = []
    work: list[Span] = []
    longest: dict[str, float] = {}
    for name, span in events:
        (wire if "nccl" in name.lower() else work).append(span)
        longest[name] = longest.get(name, 0.0) + (span[1] - span[0]) / 1e6
    top = sorted(longest.items(), key=lambda item: -item[1])[:12]
    print("longest kernels, ms:", [(n[:60], round(ms, 2)) for n, ms in top], flush=True)
    wire, work = merged(wire), merged(work)
    total = sum(end - start for start, end in wire)
    if not total:
        return {}
    return {"collectives ms": total / 1e6, "hidden": shared(wire, work) / total}
