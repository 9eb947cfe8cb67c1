"""Several processes that work on one run: how they start, and how they agree.

    distributed.start(cfg.cluster)               before anything touches a device
    step = distributed.on_leader("resume", newest_step, timeout=600)
    stop = distributed.largest(signal_number)    asked at step n, read at step n + 1

Whatever could differ between processes (a file that is there for one and not yet for
another, a signal) is decided once and told to all; otherwise they would wait for each
other in different collectives, for ever. In a process that works alone everything here
is the plain value.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax import clusters, config, roll_call
from kimi_jax.errors import UserError

_LEAST_SECONDS = 30
_SILENCE_SECONDS = 100  # of a process, until JAX ends the others
_PIECE = 1024
_HINTS = {
    "GKE": "see that all pods run: kubectl get pods; a JobSet restarts failed ones",
    "TPU VM": "the command must run on every worker: gcloud ... ssh --worker=all",
    "Slurm": "start it with srun, and one task for each process",
}


def start(
    cluster: config.Cluster, say: Callable[[str], None] | None = None
) -> clusters.Place | None:
    """Joins the other processes, where a cluster is present or asked for.

    Call it before anything touches a device, once. Says where it waits before it does,
    and returns when all processes are there: the place of this one, or None if it
    works alone.

    Args:
      say: prints a line; None: prints to the standard output.

    Raises:
      UserError: not all came within `cluster.timeout` seconds, or they do not fit
        together.
    """
    place = clusters.find(cluster, os.environ)
    if place is None:
        return None
    say = say or functools.partial(print, flush=True)
    host, _, port = place.coordinator.rpartition(":")
    say(
        f"{place.launcher}: process {place.process} of {place.processes}, coordinator "
        f"{host}, port {port}; waiting for the others, at most {cluster.timeout} s"
    )
    started = time.monotonic()
    try:
        roll_call.gather(
            place.coordinator, place.processes, place.process, cluster.timeout
        )
    except roll_call.MissingError as error:
        raise UserError(_missing(place, cluster.timeout, str(error))) from error
    handler = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_SILENCE_SECONDS,
        initialization_timeout=max(
            _LEAST_SECONDS, int(cluster.timeout - (time.monotonic() - started))
        ),
    )
    # JAX's preemption service takes SIGTERM without a word to Python, and would
    # swallow it; a run asks the others itself (`largest`).
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    say(f"all {place.processes} processes came in {time.monotonic() - started:.1f} s")
    return place


def is_leader() -> bool:
    """Whether this process writes for all: metrics, console, reports, stores."""
    return jax.process_index() == 0


def broadcast[T](value: T) -> T:
    """The leader's `value`, in every process. All must call it in the same order.

    Args:
      value: anything that JSON can hold; what the others pass is not looked at. Tuples
        come back as lists.
    """
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_leader() else b""
    size = int(_from_leader(np.asarray(len(text), np.int32)))
    return json.loads(bytes(_from_leader(_padded(text, size))[:size]))


def gather[T](value: T) -> list[T]:
    """The `value` of every process, in their order. All must call it.

    Args:
      value: anything that JSON can hold.
    """
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    sizes = _from_all(np.asarray(len(text), np.int32))
    gathered = _from_all(_padded(text, int(sizes.max())))
    pairs = zip(gathered, sizes.tolist(), strict=True)
    return [json.loads(bytes(row[:size])) for row, size in pairs]


def on_leader[T](name: str, decide: Callable[[], T], *, timeout: float) -> T:
    """`decide()` of the leader, in every process; what it fails with, too.

    Args:
      name: of what is decided, for messages; the same in every process.
      decide: called by the leader alone; returns what JSON can hold.
      timeout: seconds that the others wait for it.

    Raises:
      UserError: `decide` raised it or met a file that it cannot use, or took longer
        than `timeout`.
    """
    if jax.process_count() == 1:
        return decide()
    answer: dict[str, Any] = {}
    if is_leader():
        try:
            answer = {"value": decide()}
        except (UserError, OSError) as error:
            answer = {"error": _in_words(error)}
    barrier(name, timeout)
    answer = broadcast(answer)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def on_all[T](name: str, act: Callable[[], T]) -> T:
    """`act()` in every process; if it fails in one of them, it does in all.

    Args:
      name: of what is done, for messages; the same in every process.

    Raises:
      UserError: `act` raised it or met a file that it cannot use, here or elsewhere;
        the message names the processes.
    """
    if jax.process_count() == 1:
        return act()
    result, problem = None, None
    try:
        result = act()
    except (UserError, OSError) as error:
        problem = _in_words(error)
    problems = gather(problem)
    failed = [number for number, text in enumerate(problems) if text is not None]
    if failed:
        raise UserError(
            f"{name} failed in {len(failed)} of {len(problems)} processes; in process "
            f"{failed[0]}: {problems[failed[0]]}"
        )
    return result  # type: ignore[return-value]


def whole(x: jax.Array) -> np.ndarray:
    """The numbers of `x`, wherever its parts lie. All processes must call it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def largest(value: int) -> jax.Array | np.integer[Any]:
    """The largest `value` of all processes. All must call it equally often.

    Does not wait: int() of the result does, and is the same in every process. Asked
    beside a train step and read after the next one it costs nothing.
    """
    if jax.process_count() == 1:
        return np.int32(value)
    mesh = Mesh(np.array(jax.devices()), ("all",))
    values = jax.make_array_from_callback(
        (mesh.size,),
        NamedSharding(mesh, PartitionSpec("all")),
        lambda _: np.full(1, value, np.int32),
    )
    return _max(mesh)(values)


def leave(code: int, timeout: float = 30) -> None:
    """What a process that failed calls last; `code` is its exit code.

    Returns if all processes come here, as after an error that they share. Otherwise
    ends this one at once: JAX's own way out would wait minutes for the others, and
    they for it.
    """
    if jax.process_count() == 1:
        return
    try:
        barrier("leave", timeout)
    except UserError:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def barrier(name: str, timeout: float) -> None:
    """Returns when all processes have come to the barrier `name`.

    Raises:
      UserError: not all came within `timeout` seconds.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn()
    assert wait is not None, "more than one process without distributed.start"
    try:
        wait(key=name, timeout_ms=int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"not all processes came to {name!r} within {timeout:g} s: see the logs "
            f"of the others, one may have failed ({str(error).splitlines()[0]})"
        ) from error


def _in_words(error: UserError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _missing(place: clusters.Place, timeout: int, what: str) -> str:
    hint = next(
        (text for name, text in _HINTS.items() if place.launcher.startswith(name)),
        "start the command once for each process, with its own "
        "--config.cluster.process",
    )
    return (
        f"{place.launcher}: process {place.process} of {place.processes} waited "
        f"{timeout} s at {place.coordinator}: {what}. Is one not started ({hint}), is "
        "the port closed by a firewall, or has each been told another address or port? "
        "--config.cluster.timeout=SECONDS waits longer, --config.cluster.processes=1 "
        "works alone"
    )


def _padded(text: bytes, size: int) -> np.ndarray:
    """`text` and zeros; few lengths, as each compiles a program."""
    padded = np.zeros(-(-size // _PIECE) * _PIECE, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


def _from_leader(x: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(x))


def _from_all(x: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x))


@functools.cache
def _max(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
