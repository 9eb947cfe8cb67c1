"""The runs of a sweep as processes of this machine, a few at a time.

Each is the command that a person would type, in a session of its own, so that Ctrl-C
reaches it once and through us: it then saves and ends. A second Ctrl-C ends the runs at
once. Every run inherits a lock on the sweep's folder, so that a second sweep cannot
start what is still running, even if the first one was killed.

Seeds of a setting compile the same programs, so runs share what they compile while the
sweep is at work; not longer, as a machine with other instructions may go on with it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from kimi_jax.locks import locked
from kimi_jax.sweep import state
from kimi_jax.sweep.state import Progress
from kimi_jax.train.interrupt import Interrupt

LOCK = ".lock"
COMPILED = ".compiled"
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0


class Job(NamedTuple):
    """A run that is to be done."""

    id: str
    label: str
    command: Sequence[str]
    steps: int
    work: float  # in any unit that all jobs share, for the ETA


class Running(NamedTuple):
    """A job that is being done."""

    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    first_step: int
    started: float  # monotonic seconds
    log: pathlib.Path
    log_start: int  # bytes that earlier sessions printed


# What has changed: a job and how far it is.
Watch = Callable[[Job, Progress], None]


class Pool:
    """Runs jobs `workers` at a time in the folder `root` of a sweep."""

    def __init__(
        self, root: pathlib.Path, index: state.Index, workers: int, watch: Watch
    ):
        self._root, self._index, self._watch = root, index, watch
        self._compiled = root / COMPILED
        shared = {"JAX_COMPILATION_CACHE_DIR": str(self._compiled), **os.environ}
        self._environments = environments(workers, shared, _gpus())
        # Lists: the live table reads them from a thread of its own.
        self._waiting: list[Job] = []
        self._running: list[Running] = []
        self._done_work = self._busy_seconds = 0.0
        self._seen: dict[str, int] = {}  # steps of running jobs

    def run(self, jobs: Sequence[Job]) -> signal.Signals | None:
        """Does the jobs in their order; returns the signal that stopped it, if any.

        Raises:
          UserError: another sweep is at work in this folder.
        """
        self._waiting.extend(jobs)
        (self._root / state.LOGS).mkdir(parents=True, exist_ok=True)
        with (
            locked(self._root / LOCK, _taken(self._root)) as lock,
            Interrupt() as interrupt,
        ):
            # What a sweep that was killed has left.
            shutil.rmtree(self._compiled, ignore_errors=True)
            try:
                self._loop(lock, interrupt)
            except BaseException:
                # The second Ctrl-C, or a mistake of ours: nobody is left behind.
                self._tell(signal.SIGINT)
                for running in self._running:
                    running.process.wait()
                raise
            finally:
                shutil.rmtree(self._compiled, ignore_errors=True)
            return interrupt.requested

    def eta(self) -> float | None:
        """Seconds until all is done, at the pace so far; None when unknown."""
        now = time.monotonic()
        done, busy, left = self._done_work, self._busy_seconds, 0.0
        for running in self._running:
            job, step = running.job, self._seen[running.job.id]
            done += (step - running.first_step) * job.work / job.steps
            busy += now - running.started
            left += (job.steps - step) * job.work / job.steps
        left += sum(job.work for job in self._waiting)
        count = len(self._running) + len(self._waiting)
        if not done or not count:
            return None if count else 0.0
        return left * busy / done / min(len(self._environments), count)

    def _loop(self, lock: IO[str], interrupt: Interrupt) -> None:
        told, looked = False, 0.0
        while self._running or (self._waiting and not interrupt.requested):
            if interrupt.requested and not told:
                self._tell(signal.SIGINT)
                told = True
            for running in [r for r in self._running if r.process.poll() is not None]:
                self._end(running)
            free = len(self._environments) - len(self._running)
            while free and self._waiting and not interrupt.requested:
                self._start(self._waiting.pop(0), lock)
                free -= 1
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                for running in self._running:
                    self._look(running.job)
            time.sleep(_POLL_SECONDS)

    def _start(self, job: Job, lock: IO[str]) -> None:
        slot = min({*range(len(self._environments))} - {r.slot for r in self._running})
        before = state.look(self._root / job.id)
        path = self._root / state.LOGS / f"{job.id}.log"
        with open(path, "ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environments[slot], "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        self._index.note(job.id, "")
        self._seen[job.id] = before.step
        started = time.monotonic()
        self._running.append(
            Running(job, process, slot, before.step, started, path, log_start)
        )
        self._watch(job, before._replace(status="running"))

    def _look(self, job: Job) -> None:
        found = state.look(self._root / job.id)
        self._seen[job.id] = found.step
        self._watch(job, found._replace(status="running"))

    def _end(self, running: Running) -> None:
        job = running.job
        self._running.remove(running)
        code = running.process.returncode
        failure = state.failure_of(code, running.log, running.log_start)
        self._index.note(job.id, failure)
        found = state.look(self._root / job.id, failure)
        steps = found.step - running.first_step
        self._done_work += steps * job.work / job.steps
        self._busy_seconds += time.monotonic() - running.started
        self._watch(job, found)

    def _tell(self, number: signal.Signals) -> None:
        for running in self._running:
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(number)


def environments(
    workers: int, environ: Mapping[str, str], gpus: Sequence[str]
) -> list[dict[str, str]]:
    """The environment of each worker: the machine's GPUs, dealt out evenly.

    With more workers than GPUs, several share one, and each takes its part of the
    memory, where JAX would take three quarters.
    """
    found = []
    for worker in range(workers):
        own = dict(environ)
        if gpus:
            mine = gpus[worker::workers] or [gpus[worker % len(gpus)]]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if gpus and workers > len(gpus):
            sharing = -(-workers // len(gpus))
            own.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / sharing:.3f}")
        found.append(own)
    return found


def _gpus() -> list[str]:
    """The GPUs that we may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name for name in allowed.split(",") if name]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _taken(root: pathlib.Path) -> str:
    return (
        f"a sweep, or a run that one has left behind, is at work in {root}; wait for "
        "it, or end it"
    )
