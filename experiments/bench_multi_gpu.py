"""Several GPUs of one host: checks against one of them, then times.

Parts, in the order in which a reader would doubt them: is a step right on every mesh,
do experts elsewhere get and give what they should, how fast are the links, and what do
KDA, experts and a whole step gain. Every row is printed as soon as it is known.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from experiments import bench_kda, multi_gpu_checks, multi_gpu_step
from experiments.multi_gpu_turns import Turns
from kimi_jax import config as config_lib
from kimi_jax import distributed, gpus, hlo
from kimi_jax.errors import UserError
from kimi_jax.ops.activations import situ
from kimi_jax.ops.context_kda import context_kda
from kimi_jax.ops.dispatch import Options, dispatch
from pallas_kernels.kda import kda


def run(config: ConfigDict) -> dict:
    """Returns the device, versions and one row a check or measurement."""
    unknown = set(config.parts) - set(PARTS)
    if unknown:
        raise UserError(f"parts={sorted(unknown)} do not exist; choose of {[*PARTS]}")
    gpus.check()
    distributed.start(config_lib.Cluster(**config.cluster))
    if jax.device_count() < 2:
        raise UserError(
            f"one {jax.devices()[0].device_kind}; this suite compares several devices"
        )
    rows, turns = [], Turns(config.turns)
    for part in config.parts:
        turns.together()
        for row in PARTS[part](config, turns):
            if distributed.is_leader():
                print(json.dumps(row), flush=True)
            rows.append(row)
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": f"jax {jax.__version__}, {jax.process_count()} processes",
        "rows": rows,
    }


def mesh_of(count: int, axis: str) -> Mesh:
    """The first devices in a row; one device of this process."""
    devices = jax.local_devices()[:1] if count == 1 else jax.devices()[:count]
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def counts() -> tuple[int, int]:
    return 1, jax.device_count()


def links(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """Bytes a second that a device sends, for each kind of collective alone."""
    turns.alone()
    N, axis = jax.device_count(), "all"
    mesh, size = mesh_of(N, axis), config.link_bytes
    around = [(i, (i + 1) % N) for i in range(N)]
    trade = {"split_axis": 0, "concat_axis": 0, "tiled": True}
    kinds: dict[str, tuple[Callable, float]] = {
        "all_gather": (lambda x: jax.lax.all_gather(x, axis), N - 1),
        "ppermute": (lambda x: jax.lax.ppermute(x, axis, around), 1),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, axis, **trade), (N - 1) / N),
        "psum": (lambda x: jax.lax.psum(x, axis), 2 * (N - 1) / N),
    }
    spread = NamedSharding(mesh, P(axis))
    make = jax.jit(
        lambda: jnp.ones((N * size // 2,), jnp.bfloat16), out_shardings=spread
    )
    x = make()
    for name, (collective, share) in kinds.items():
        local = jax.shard_map(
            collective, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False
        )
        call = partial(jax.jit(local), x)
        ms = bench_kda.milliseconds(call, config.rounds, calls=config.calls)
        yield {
            "case": f"{name} of {size / 2**20:g} MiB",
            "implementation": f"{N} devices",
            "ms": ms,
            "sent GB/s": share * size / ms / 1e6,
        }


def kda_scaling(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """KDA forward and backward with time over all devices, against one."""
    programs = {}
    for length in config.kda_lengths:
        for count in counts():
            run, make = kda_program(length, config.kda_heads, config.width, count)
            made = make.lower().compile()
            given = jax.eval_shape(make)
            programs[length, count] = run.lower(*given, None).compile(), made
    turns.alone()
    for length in config.kda_lengths:
        alone = None
        for count in counts():
            run, make = programs[length, count]
            ms = kda_milliseconds(run, make, config.rounds)
            alone = alone or ms
            yield {
                "case": f"KDA both passes, T={length}, H={config.kda_heads}",
                "implementation": f"context={count}",
                "ms": ms,
                "speedup": alone / ms,
                "extra GB": run.memory_analysis().temp_size_in_bytes / 1e9,
            }


def kda_checks(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """Documents across the border, in both dtypes, against one device."""
    del turns  # nothing is timed
    length, rows = config.kda_check_length, list[dict]()
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 6, (1, length)), axis=1).astype(np.int32)
    ids[0, length // 2 - 40 : length // 2 + 3] = 0
    for dtype, limit in (("float32", 1e-4), ("bfloat16", bench_kda.LARGEST_ERROR)):
        for name, given in (("one document", None), ("packed", ids)):
            results: list[Any] = []
            for count in counts():
                run, make = kda_program(
                    length, 4, config.width, count, dtype, given is not None
                )
                results.append(multi_gpu_checks.fetch(run(*make(), given)))
            errors = multi_gpu_checks.errors(results[1], results[0])
            sums = [errors.pop(key) for key in ("A_log", "dt_bias")]
            row = {
                "case": f"KDA, {name}, T={length}",
                "implementation": dtype,
                "error": float(np.max([*errors.values()])),
                "limit": limit,
                "sums error": float(np.max(sums)),
                "sums limit": 4 * limit,
            }
            rows.append(row)
            yield row
    multi_gpu_checks.judge(rows)


def kda_program(
    length: int,
    heads: int,
    width: int,
    count: int,
    dtype: str = "bfloat16",
    packed: bool = False,
) -> tuple[Any, Any]:
    """(x, do, ids) -> gradients, which take the place of x; and what makes x and do."""
    mesh, split = mesh_of(count, "context"), P(None, "context")
    specs = dict.fromkeys(("q", "k", "v", "g", "beta"), split)
    specs |= {"A_log": P(), "dt_bias": P()}

    def forward(x, ids):
        settings = {**bench_kda.SETTINGS, "segment_ids": ids}
        if count == 1:
            return kda(**x, **settings)[0]
        return context_kda(**x, axis="context", **settings)[0]

    def both(x, do, ids):
        _, pull = jax.vjp(lambda x: forward(x, ids), x)
        return pull(do)[0]

    in_specs = specs, split, split if packed else None
    over = both
    if count > 1:
        over = jax.shard_map(both, mesh=mesh, in_specs=in_specs, out_specs=specs)
    places = jax.tree.map(partial(NamedSharding, mesh), (specs, split))

    def make():
        drawn = min(length, 2**17)  # the rest repeats it

        def whole(a):
            return jnp.tile(a.astype(dtype), (1, length // drawn, *(1,) * (a.ndim - 2)))

        x = bench_kda.arrays(1, drawn, heads, width)
        do = jax.random.normal(jax.random.key(1), x["v"].shape, jnp.bfloat16)
        return {n: whole(a) if a.ndim > 2 else a for n, a in x.items()}, whole(do)

    # At 1M tokens there is room for one of the two.
    step = jax.jit(
        over,
        donate_argnums=0,
        in_shardings=(*places, None),
        out_shardings=places[0],
    )
    return step, jax.jit(make, out_shardings=places)


def kda_milliseconds(run: Callable, make: Callable, rounds: int) -> float:
    """Median of single calls, each on data made anew: a call uses up its inputs."""
    times = []
    for _ in range(rounds + 1):
        x, do = jax.block_until_ready(make())
        started = time.perf_counter()
        result = jax.block_until_ready(run(x, do, None))
        times.append(time.perf_counter() - started)
        del x, do, result
    return 1e3 * statistics.median(times[1:])


def expert_scaling(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """A layer's routed experts, forward and backward, against all on one device."""
    programs = {
        (latent, method, count): expert_program(latent, count, method, config)
        for latent in config.latents
        for method in ("capacity", "ragged")
        for count in counts()
    }
    # One after the other: kernels are tuned on matrices of the full size.
    compiled_by_name = {name: x[0].compile() for name, x in programs.items()}
    turns.alone()
    alone: dict[Any, float] = {}
    for (latent, method, count), (_, make) in programs.items():
        compiled, inputs = compiled_by_name[latent, method, count], make()
        ms = bench_kda.milliseconds(partial(compiled, *inputs), config.rounds)
        del inputs
        alone.setdefault((latent, method), ms)
        row = {
            "case": f"experts, latent {latent}, {config.expert_tokens} tokens",
            "implementation": f"{method}, expert={count}",
            "ms": ms,
            "speedup": alone[latent, method] / ms,
        }
        if count > 1:
            traffic = hlo.collective_bytes(compiled.as_text())
            row["sent MB"] = sum(one.sent_bytes for one in traffic.values()) / 1e6
        yield row


def expert_program(
    latent: int, count: int, method: str, config: ConfigDict
) -> tuple[Any, Callable]:
    """Both passes over a layer's experts, lowered, and what makes their inputs."""
    E, A, F = config.experts, config.active, config.expert_width
    N, mesh, dtype = config.expert_tokens, mesh_of(count, "expert"), config.expert_dtype
    axis, split = (None if count == 1 else "expert"), P("expert")
    options = Options(method, axis, capacity_factor=config.capacity_factor)
    shapes = {"gate": (E, latent, F), "up": (E, latent, F), "down": (E, F, latent)}

    def make():
        keys = iter(jax.random.split(jax.random.key(0), 6))
        draw = jax.random.normal
        w = {n: 0.02 * draw(next(keys), s, dtype) for n, s in shapes.items()}
        x, dy = (draw(next(keys), (N, latent), dtype) for _ in "xy")
        scores = jax.random.uniform(next(keys), (N, E))
        weights, experts = jax.lax.top_k(scores, A)
        return w, x, weights, experts, dy

    def both(w, x, weights, experts, dy):
        def forward(w, x, weights):
            activation = partial(situ, beta=4.0, linear_beta=25.0)
            args = x, experts, weights, w["gate"], w["up"], w["down"]
            return dispatch(*args, activation, options).y_NL

        return jax.vjp(forward, w, x, weights)[1](dy)

    over = both
    if count > 1:
        over = jax.shard_map(
            both, mesh=mesh, in_specs=(split,) * 5, out_specs=(split,) * 3
        )
    place = NamedSharding(mesh, split)
    made = jax.jit(make, out_shardings=place)
    step = jax.jit(over, in_shardings=place)
    return step.lower(*jax.eval_shape(make)), made


PARTS: dict[str, Callable[[ConfigDict, Turns], Iterator[dict]]] = {
    "meshes": multi_gpu_checks.meshes,
    "dispatch": multi_gpu_checks.dispatches,
    "kda_check": kda_checks,
    "links": links,
    "kda": kda_scaling,
    "experts": expert_scaling,
    "step": multi_gpu_step.steps,
}
