"""What ran on GPUs, and when, as JAX's profiler saw it."""

import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

Span = tuple[float, float]
Kernels = list[tuple[str, Span]]


def trace(call: Callable[[], Any]) -> tuple[Any, list[Kernels]]:
    """What a call returns; and of each GPU its kernels: name, start and end in ns."""
    with tempfile.TemporaryDirectory(prefix="kimi_jax_trace_") as folder:
        with jax.profiler.trace(folder):
            result = jax.block_until_ready(call())
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        found = [list(_kernels(plane)) for file in files for plane in _gpus(file)]
    return result, found


def _gpus(file: pathlib.Path) -> Iterator[Any]:
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU"):
            yield plane


def _kernels(plane: Any) -> Iterator[tuple[str, Span]]:
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield event.name, (event.start_ns, event.start_ns + event.duration_ns)


def busy(kernels: Iterable[tuple[str, Span]]) -> float:
    """Nanoseconds in which at least one kernel ran."""
    return sum(end - start for start, end in merged([span for _, span in kernels]))


def merged(spans: list[Span]) -> list[Span]:
    """The same times, in order and without overlaps."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def shared(a: list[Span], b: list[Span]) -> float:
    """How long both run; each in order and without overlaps."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
