"""Is this machine fit for a run? Each problem comes with its fix.

`software` and `limits` touch no device, so that they can be printed before `devices`
and `round_trip`, which may fail or hang where drivers or networks are broken.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.kda import choose_implementation

_PACKAGES = ("kimi_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PLUGINS = (
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-rocm7-plugin",
    "triton",
)
_GIGABYTE = 10**9
_LEAST_FREE = 10 * _GIGABYTE
_LEAST_SHARED = 1 * _GIGABYTE
_LEAST_FILES = 4096
_ROUND_TRIP_WIDTH = 1024


class Finding(NamedTuple):
    """What was looked at, what it is, and for a problem what to do about it."""

    name: str
    value: str
    fix: str = ""
    broken: bool = False  # a run would fail, not only be slower or end early


def software() -> list[Finding]:
    """Versions of Python, of the libraries, and of what drives the accelerator."""
    found = {name: _version(name) for name in (*_PACKAGES, *_PLUGINS)}
    rows = [Finding("python", platform.python_version())]
    rows += [_package(name, found[name]) for name in _PACKAGES]
    rows += [
        _plugin(name, version, found["jaxlib"])
        for name in _PLUGINS
        if (version := found[name])
    ]
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, version: str | None) -> Finding:
    if version is not None:
        return Finding(name, version)
    # From a plain checkout the project runs, but knows no version.
    fix = "run `pip install -e .` in the checkout, so that its requirements are checked"
    return Finding(name, "not installed", fix, broken=name != "kimi_jax")


def _plugin(name: str, version: str, jaxlib: str | None) -> Finding:
    if name.startswith("jax-") and version != jaxlib:
        extra = "rocm" if "rocm" in name else "gpu"
        fix = f"install one version of both: pip install -U 'kimi_jax[{extra}]'"
        return Finding(name, f"{version}, but jaxlib is {jaxlib}", fix)
    return Finding(name, version)


def limits(folder: pathlib.Path) -> list[Finding]:
    """Disk, compile cache, open files, shared memory.

    Args:
      folder: where the run will write; it need not exist.
    """
    rows = [disk(folder), compile_cache(jax.config.jax_compilation_cache_dir)]
    try:
        import resource
    except ImportError:  # not a POSIX system
        return rows
    rows.append(open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    shared = pathlib.Path("/dev/shm")
    if shared.exists():
        rows.append(shared_memory(shutil.disk_usage(shared).total, bool(_gpus())))
    return rows


def disk(folder: pathlib.Path) -> Finding:
    """Whether `folder` can be written, and how much is free there."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    value = f"{free / _GIGABYTE:,.1f} GB free at {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK):
        fix = f"{there} cannot be written; name another folder, or get permission"
        return Finding("disk", value, fix, broken=True)
    if free < _LEAST_FREE:
        fix = (
            "a checkpoint takes about 8 to 12 bytes a parameter, and one more than is "
            "kept must fit; free some space or name another --workdir"
        )
        return Finding("disk", value, fix)
    return Finding("disk", value)


def compile_cache(directory: str | None) -> Finding:
    """JAX's cache of compiled programs: where, how large."""
    if not directory:
        fix = (
            "a restart compiles everything again; export "
            "JAX_COMPILATION_CACHE_DIR=DIR, a folder that stays (on a pod, shared)"
        )
        return Finding("compile cache", "not set", fix)
    if "://" in directory:
        return Finding("compile cache", f"{directory} (remote, not checked)")
    folder = pathlib.Path(directory)
    if not folder.exists():
        above = disk(folder)
        fix = above.fix if above.broken else ""
        return Finding("compile cache", f"{folder}, not there yet", fix, above.broken)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        fix = "cannot be written; set JAX_COMPILATION_CACHE_DIR to another folder"
        return Finding("compile cache", str(folder), fix, broken=True)
    sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()]
    size = f"{len(sizes):,} files, {sum(sizes) / _GIGABYTE:,.2f} GB"
    return Finding("compile cache", f"{folder}, {size}")


def open_files(limit: int) -> Finding:
    """How many files a process may hold open; -1 is any number."""
    if 0 <= limit < _LEAST_FILES:
        fix = "checkpoints and peers of a large run need more; run `ulimit -n 65536`"
        return Finding("open files", f"{limit:,}", fix)
    return Finding("open files", "any number" if limit < 0 else f"{limit:,}")


def shared_memory(size: int, gpus: bool) -> Finding:
    """Size of /dev/shm, through which NCCL connects GPUs."""
    value = f"{size / _GIGABYTE:,.1f} GB"
    if gpus and size < _LEAST_SHARED:
        fix = (
            "NCCL between GPUs may fail; start the container with --shm-size=16g, or "
            "mount a memory-backed volume at /dev/shm"
        )
        return Finding("shared memory", value, fix)
    return Finding("shared memory", value)


def devices(environment: Mapping[str, str]) -> tuple[list[Finding], Sequence[Any]]:
    """What JAX computes on, and the devices themselves; none if it cannot start."""
    platforms = environment.get("JAX_PLATFORMS", "")
    try:
        found = jax.devices()
    except RuntimeError as error:
        return [_no_backend(str(error), platforms)], ()
    first = jax.local_devices()[0]
    here = f", {jax.local_device_count()} of them here"
    value = f"{len(found)} x {first.device_kind}" + here * (jax.process_count() > 1)
    rows = [
        unused(first.platform, platforms, bool(_gpus()), bool(_tpus()))
        or Finding("devices", value),
        Finding("memory", _memory(first)),
    ]
    return rows, found


def unused(used: str, platforms: str, gpus: bool, tpus: bool) -> Finding | None:
    """A problem if JAX computes on the CPU beside an accelerator."""
    if used != "cpu" or platforms == "cpu":
        return None
    for present, name, extra in ((tpus, "TPU", "tpu"), (gpus, "GPU", "gpu")):
        if present:
            fix = (
                f"JAX does not see the {name} of this machine; install "
                f"pip install -U 'kimi_jax[{extra}]', end other processes that hold "
                "it, or set JAX_PLATFORMS=cpu if this is meant"
            )
            return Finding("devices", f"CPU, although there is a {name}", fix, True)
    return None


def _no_backend(error: str, platforms: str) -> Finding:
    if platforms:
        fix = (
            f"JAX_PLATFORMS={platforms} is set: unset it, or install what it needs "
            "(pip install -U 'kimi_jax[gpu]' or 'kimi_jax[tpu]')"
        )
    else:
        fix = "end other processes that hold the accelerator, then check its driver"
    return Finding("devices", error.splitlines()[0], fix, broken=True)


def _memory(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return f"{limit / _GIGABYTE:,.1f} GB a device"
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / _GIGABYTE:,.1f} GB, the machine's"


def _gpus() -> list[pathlib.Path]:
    return list(pathlib.Path("/dev").glob("nvidia[0-9]*"))


def _tpus() -> list[pathlib.Path]:
    nodes = (pathlib.Path("/dev/accel0"), pathlib.Path("/dev/vfio/0"))
    return [node for node in nodes if node.exists()]


def round_trip(over: Sequence[Any]) -> Finding:
    """Numbers to all devices, summed over them, and back."""
    started, count = time.monotonic(), len(over)
    mesh = Mesh(np.array(over), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    host = np.repeat(np.arange(count, dtype=np.int32), _ROUND_TRIP_WIDTH)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "all"),
            mesh=mesh,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec(),
        )
    )
    fix = (
        "the devices cannot work together: see dmesg for their errors; on GPUs run "
        "again with NCCL_DEBUG=INFO; on a pod try each machine by itself with "
        "--config.cluster.processes=1"
    )
    try:
        x = jax.make_array_from_callback(host.shape, rows, lambda index: host[index])
        back = [(np.asarray(s.data), host[s.index]) for s in x.addressable_shards]
        summed = np.asarray(total(x).addressable_data(0))
    except jax.errors.JaxRuntimeError as error:
        return Finding("round trip", str(error).splitlines()[0], fix, broken=True)
    same = all(np.array_equal(*pair) for pair in back)
    if not same or (summed != count * (count - 1) // 2).any():
        what = "sum over the devices" if same else "copy to a device and back"
        return Finding("round trip", f"wrong numbers: {what}", fix, broken=True)
    seconds = time.monotonic() - started
    return Finding("round trip", f"over {count} devices in {seconds:.2f} s")


def kernels(backend: str) -> list[Finding]:
    """Which kernel each operation runs on `backend`, and why not another."""
    return [Finding("kda kernel", ": ".join(choose_implementation(None, backend)))]
