"""Which cluster this process was started in, and its place there.

Read from the environment that each launcher leaves, so it can be tested with made-up
ones. JAX could find most of this out by itself, but only while it already waits for
the other processes, and a user who waits wants to know for whom.
"""

from __future__ import annotations

import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kimi_jax import config
from kimi_jax.errors import UserError

Environment = Mapping[str, str]
# The value of an attribute of this machine, or None where nobody can say.
Metadata = Callable[[str], str | None]

# What JAX itself uses on TPUs, so that firewall rules made for it fit.
TPU_PORT = 8482
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_METADATA_SECONDS = 5.0


class Place(NamedTuple):
    """Where this process stands among the processes of a run.

    `local_devices` are the GPUs it may use, where several processes share a machine;
    None: all that it sees.
    """

    launcher: str
    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None


class _Found(NamedTuple):
    """As `Place`; None where a launcher does not say."""

    launcher: str
    coordinator: str | None
    processes: int | None
    process: int | None
    local_devices: tuple[int, ...] | None = None


def find(
    cluster: config.Cluster,
    environment: Environment,
    *,
    metadata: Metadata | None = None,
    gpus: int | None = None,
) -> Place | None:
    """The place of this process, or None if it works alone.

    Fields of `cluster` go before what the environment says. A cluster of one process
    is none.

    Args:
      metadata: asks the machine's metadata server; None: where there are TPUs.
      gpus: how many this machine has; None: counts them.

    Raises:
      UserError: a cluster is there or asked for, but not all of it is known.
    """
    if cluster.processes == 1:
        return None
    if metadata is None:
        metadata = _ask_google if _has_tpus() else lambda _: None
    if gpus is None:
        gpus = len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))
    found = (
        _gke(environment)
        or _tpu_vm(environment, metadata)
        or _slurm(environment, gpus)
        or _open_mpi(environment, gpus)
        or _Found("config.cluster", None, None, None)
    )
    asked = (cluster.coordinator, cluster.processes, cluster.process)
    if found.processes == 1 and cluster.processes is None:
        return None
    if found.launcher == "config.cluster" and asked == (None, None, None):
        return None
    named: dict[str, Any] = {
        "coordinator": asked[0],
        "processes": asked[1],
        "process": asked[2],
    }
    given = {name: value for name, value in named.items() if value is not None}
    return _checked(found._replace(**given))


def _checked(found: _Found) -> Place:
    missing = [
        f"--config.cluster.{name}={example}"
        for name, example in (
            ("coordinator", "HOST:PORT"),
            ("processes", "NUMBER"),
            ("process", "NUMBER"),
        )
        if getattr(found, name) is None
    ]
    if missing:
        raise UserError(
            f"{found.launcher} does not say everything about the cluster; add "
            f"{' '.join(missing)} (process counts from 0 and differs for each), or "
            "--config.cluster.processes=1 to work alone"
        )
    place = Place(*found)  # type: ignore[arg-type]
    if not 0 <= place.process < place.processes:
        raise UserError(
            f"{place.launcher}: process {place.process} of {place.processes}; "
            f"--config.cluster.process counts from 0 to {place.processes - 1}"
        )
    return place


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name, "")
    if not text.strip().isdigit():
        raise UserError(
            f"{name}={text!r} in the environment: must be a number; unset what an "
            "earlier job left there, or work alone: --config.cluster.processes=1"
        )
    return int(text)


def _gke(environment: Environment) -> _Found | None:
    """Pods of a JobSet with TPUs: GKE's webhook sets these."""
    names = environment.get("TPU_WORKER_HOSTNAMES")
    if names is None:
        return None
    slices = _slices(environment.get)
    worker = _number(environment, "TPU_WORKER_ID") if "," in names else 0
    return _tpu("GKE", names.split(","), worker, slices)


def _tpu_vm(environment: Environment, metadata: Metadata) -> _Found | None:
    """Hosts of a TPU VM slice: the metadata server knows them."""
    if "TPU_SKIP_MDS_QUERY" in environment:
        return None
    worker = metadata("agent-worker-number")
    endpoints = metadata("worker-network-endpoints")
    if worker is None or endpoints is None:
        return None
    # Of "name:id:address,..." or, on newer machines, "address,...".
    names = [item.split(":")[-1] for item in endpoints.split(",")]
    lines = re.findall(r"(\w+): *'?([^'\n]*)'?", metadata("tpu-env") or "")
    described = {**dict(lines), **environment}
    return _tpu("TPU VM", names, int(worker), _slices(described.get))


class _Slices(NamedTuple):
    coordinator: str | None
    number: int
    mine: int


def _slices(get: Callable[[str], str | None]) -> _Slices:
    number = int(get("MEGASCALE_NUM_SLICES") or 1)
    coordinator = get("MEGASCALE_COORDINATOR_ADDRESS")
    if number > 1 and not (coordinator and get("MEGASCALE_SLICE_ID")):
        raise UserError(
            f"MEGASCALE_NUM_SLICES={number}, but MEGASCALE_COORDINATOR_ADDRESS or "
            "MEGASCALE_SLICE_ID is missing; unset it for a single slice, or start "
            "every slice with the same launcher"
        )
    return _Slices(coordinator, number, int(get("MEGASCALE_SLICE_ID") or 0))


def _tpu(launcher: str, names: list[str], worker: int, slices: _Slices) -> _Found:
    host = (slices.coordinator or names[0]).split(":")[0]
    if slices.number > 1:
        launcher = f"{launcher}, slice {slices.mine} of {slices.number}"
    return _Found(
        launcher,
        f"{host}:{TPU_PORT}",
        len(names) * slices.number,
        len(names) * slices.mine + worker,
    )


def _slurm(environment: Environment, gpus: int) -> _Found | None:
    """Tasks of an `srun`. Inside a bare allocation there is no step, and no cluster."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None or "SLURM_PROCID" not in environment:
        return None
    job = _number(environment, "SLURM_JOB_ID")
    tasks = "SLURM_STEP_NUM_TASKS"
    if tasks not in environment:
        tasks = "SLURM_NTASKS"
    # "4(x2),3": tasks on each node, in the order of their numbers.
    here: list[int] = []
    for count, _, repeat in re.findall(
        r"(\d+)(\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    ):
        here += [int(count)] * int(repeat or 1)
    node = int(environment.get("SLURM_NODEID", 0))
    local = int(environment.get("SLURM_LOCALID", 0))
    return _Found(
        f"Slurm job {job}",
        f"{_first_host(nodes)}:{_job_port(job)}",
        _number(environment, tasks),
        _number(environment, "SLURM_PROCID"),
        _share_of_gpus(environment, gpus, here[node] if node < len(here) else 1, local),
    )


def _first_host(nodes: str) -> str:
    """ "a[007-015,020],b3" -> "a007"."""
    prefix, first = re.match(r"([^,\[]+)(?:\[([^-,\]]+))?", nodes).groups()  # type: ignore[union-attr]
    return prefix + (first or "")


def _job_port(job: int) -> int:
    """A port that two jobs on one machine are unlikely to share."""
    return 61440 + job % 4096


def _open_mpi(environment: Environment, gpus: int) -> _Found | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    # Open MPI 5 no longer says where the first process runs.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\..*?tcp6?://\[?([^,\]:]+)", uri)
    return _Found(
        "Open MPI",
        f"{match[2]}:{_job_port(int(match[1]) // 4096)}" if match else None,
        _number(environment, "OMPI_COMM_WORLD_SIZE"),
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        _share_of_gpus(
            environment,
            gpus,
            int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)),
            int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)),
        ),
    )


def _share_of_gpus(
    environment: Environment, gpus: int, processes: int, process: int
) -> tuple[int, ...] | None:
    """The GPUs of process `process` of the `processes` on this machine.

    One process a machine takes all. One visible GPU was bound by the launcher.

    Raises:
      UserError: the GPUs cannot be dealt out evenly.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        gpus = len([item for item in listed.split(",") if item.strip()])
    if processes == 1 or gpus <= 1:
        return None
    if gpus % processes:
        raise UserError(
            f"{processes} processes on this machine for {gpus} GPUs; start one a "
            f"machine, or {gpus}"
        )
    size = gpus // processes
    return tuple(range(process * size, (process + 1) * size))


def _has_tpus() -> bool:
    return any(pathlib.Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0"))


def _ask_google(attribute: str) -> str | None:
    request = urllib.request.Request(
        _METADATA + attribute, headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return None
