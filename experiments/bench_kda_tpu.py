"""KDA on TPUs that are not here: what their compiler makes of it, ours and the peer's.

The compiler schedules every kernel into bundles, the instructions of one cycle. Bundles
times programs, over the clock, is a lower bound of a kernel's time, as if no program
ever waited for memory; to it come the bytes that XLA's own operations around the
kernels move. Where there is a TPU, the same calls are timed as well.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments import bench_kda
from kimi_jax import hardware, hlo, topology
from kimi_jax.errors import UserError
from pallas_kernels.kda import kda

SLICES = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# Cycles a second. Google publishes none; these follow from the peak FLOPs of a chip and
# the sizes of its matrix units.
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}

Case = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def run(config: ConfigDict) -> dict:
    """Returns versions and one row for each generation, shape, pass and party."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "no TPU compiler; run `pip install -e .[tpu]` (no TPU is needed)"
        )
    rows = []
    with tempfile.TemporaryDirectory(prefix="kda_tpu_static_") as folder:
        # Read as the compiler is loaded, by the first topology.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        )
        for generation in config.generations:
            for shape in config.shapes:
                for name, case in cases(shape, config).items():
                    row = measure(generation, case, pathlib.Path(folder))
                    row = {"generation": generation, "case": f"{name} {shape}", **row}
                    print({key: value for key, value in row.items() if value})
                    rows.append(row)
    if jax.default_backend() == "tpu":
        for shape in config.shapes:
            rows += bench_kda.timed("mosaic_tpu", tuple(shape), config)
    return {
        "device": "TPU compiler",
        "versions": f"jax {jax.__version__}",
        "rows": rows,
    }


def cases(shape: tuple[int, int, int], config: ConfigDict) -> dict[str, Case]:
    """Calls to compile, by name; `shape` is batch, tokens, heads."""
    parties: dict[str, Callable[[bool], Callable]] = {"ours": ours}
    if config.peer:
        if importlib.util.find_spec("tokamax") is None:
            print("peer skipped: tokamax is not installed")
        else:
            parties["tokamax"] = partial(tokamax, segments=config.segments)
    found = {}
    for party, make in parties.items():
        for packed in (False, True) if config.segments else (False,):
            forward = make(packed)
            arrays = arguments(shape, config.width, head_first=party == "tokamax")
            ids = [jax.ShapeDtypeStruct(shape[:2], jnp.int32)] * packed
            label = f"{party}{', packed' * packed}"
            found[f"{label}: forward"] = forward, [*arrays, *ids]
            both = partial(forward_backward, forward)
            found[f"{label}: both"] = both, [arrays[2], *arrays, *ids]
    return found


def forward_backward(forward: Callable, do: Any, *arrays: Any) -> Any:
    floats, ids = arrays[:7], arrays[7:]
    return jax.vjp(lambda *x: forward(*x, *ids), *floats)[1](do)


def arguments(
    shape: tuple[int, int, int], width: int, head_first: bool
) -> list[jax.ShapeDtypeStruct]:
    """q, k, v, g, beta, A_log, dt_bias."""
    batch, length, heads = shape
    tokens = (heads, batch, length) if head_first else (batch, length, heads)
    half, wide = jnp.bfloat16, jnp.float32
    wanted: list[tuple[tuple[int, ...], Any]] = [((*tokens, width), half)] * 4
    wanted += [(tokens, wide if head_first else half)]
    wanted += [((heads,), wide), ((heads * width,), wide)]
    return [jax.ShapeDtypeStruct(*one) for one in wanted]


def ours(packed: bool) -> Callable:
    """Our kernels; whether documents are packed shows in the arguments."""
    del packed

    def forward(q, k, v, g, beta, A_log, dt_bias, ids=None):
        settings: dict[str, Any] = {**bench_kda.SETTINGS, "segment_ids": ids}
        arrays = q, k, v, g, beta
        return kda(
            *arrays,
            A_log=A_log,
            dt_bias=dt_bias,
            implementation="mosaic_tpu",
            **settings,
        )[0]

    return forward


def tokamax(packed: bool, segments: int) -> Callable:
    """The peer's kernels, in its own layout; it normalises q and k and takes beta."""
    from tokamax._src import config
    from tokamax._src.ops.kda import api

    def forward(q, k, v, g, beta, A_log, dt_bias, ids=None):
        with config.cross_compile(True):
            return api.kimi_delta_attention(
                *(q, k, v, g, beta),
                a_log=A_log,
                delta_time_bias=dt_bias,
                use_qk_l2norm=True,
                use_gate_in_kernel=True,
                lower_bound=-5.0,
                segment_ids=ids,
                max_num_segments=segments if packed else None,
                implementation="mosaic",
            )[0]

    return forward


def measure(generation: str, case: Case, folder: pathlib.Path) -> dict:
    """Compiles a call for one chip and reads off what it costs."""
    for file in folder.glob("*"):
        file.unlink() if file.is_file() else None
    function, arrays = case
    mesh = Mesh(topology.devices(SLICES[generation])[:1], ("x",))
    spread = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread) for x in arrays]
    started = time.monotonic()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function).trace(*arrays)
        lowered = traced.lower()
    compiled = lowered.compile()
    seconds = time.monotonic() - started
    text = compiled.as_text()
    kernel_bytes, other_bytes = hlo.memory_bytes(text)
    names = re.findall(r"%([\w.\-]+) = [^\n]* custom-call\([^\n]*tpu_custom_call", text)
    programs = list(grids(traced.jaxpr.jaxpr))
    assert len(names) == len(programs), (names, programs)
    bundles = sum(
        scheduled(folder, name) * n for name, n in zip(names, programs, strict=True)
    )
    bandwidth = hardware.DEVICES[hardware.GENERATIONS[generation]].bandwidth
    memory = compiled.memory_analysis()
    milliseconds = bundles / CLOCK[generation] + other_bytes / bandwidth
    return {
        "bundles M": bundles / 1e6,
        "XLA MB": other_bytes / 1e6,
        "static ms": 1e3 * milliseconds,
        "kernels MB": kernel_bytes / 1e6,
        "temporaries MB": memory.temp_size_in_bytes / 1e6,
        "compile s": seconds,
        "kernels": ", ".join(
            f"{name} {scheduled(folder, name)} x {n}"
            for name, n in zip(names, programs, strict=True)
        ),
    }


def grids(jaxpr: Any) -> Iterator[int]:
    """Programs of every kernel, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield math.prod(equation.params["grid_mapping"].grid)
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from grids(inner)


def scheduled(folder: pathlib.Path, kernel: str) -> int:
    """Bundles of one program of a kernel."""
    files = folder.glob(f"*-{kernel}-*-schedule-analysis_final_bundles.txt")
    text = max(files, key=lambda file: file.stat().st_mtime).read_text()
    found = re.search(r"total scheduled bundles:\s+(\d+)", text)
    assert found is not None, kernel
    return int(found[1])
