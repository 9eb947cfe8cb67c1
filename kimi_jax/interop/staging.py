"""Work on a folder that shall exist whole or not at all.

Everything is written into NAME.part beside it, by many threads. A list in there says
what is finished, with the CRC-32 of its bytes, so that the same command goes on after a
kill. When all is done every byte is read again and compared, and the folder gets its
name.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

from kimi_jax.interop.entries import InteropError

LIST = ".finished.jsonl"


class Job(NamedTuple):
    """A piece of work that can be done, and done again, by itself.

    key: of what it writes.
    bytes: how many it writes.
    write: does it, and returns their CRC-32.
    check: the CRC-32 of what is there.
    """

    key: str
    bytes: int
    write: Callable[[], int]
    check: Callable[[], int]


class Progress(NamedTuple):
    """Of one pass over all jobs; skipped bytes are those of an earlier run."""

    phase: str  # "writing" or "verifying"
    done: int
    total: int
    skipped: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return (self.done - self.skipped) / max(self.seconds, 1e-9)

    @property
    def eta_seconds(self) -> float:
        return (self.total - self.done) / max(self.rate, 1e-9)


class Staging:
    """`folder`.part as a context manager; `publish` makes it `folder`.

    Args:
      folder: the result; must not exist, or be empty.
      identity: what the result depends on; work of another identity is not continued.

    Raises:
      InteropError: there is something at `folder`, the unfinished work there is of
        another conversion, or another process is at it.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, Any]):
        self.folder = pathlib.Path(folder).absolute()
        self.part = self.folder.with_name(f"{self.folder.name}.part")
        self.finished: dict[str, tuple[int, int]] = {}  # key: (bytes, CRC-32)
        if self.folder.exists() and (
            not self.folder.is_dir() or any(self.folder.iterdir())
        ):
            raise InteropError(
                f"{self.folder} exists; name another folder, or remove it"
            )
        self.part.mkdir(parents=True, exist_ok=True)
        self._list = open(self.part / LIST, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            self._lock()
            self._read(json.loads(json.dumps(identity)))
        except BaseException:
            self._list.close()
            raise

    def run(
        self,
        jobs: Iterable[Job],
        *,
        workers: int,
        show: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Do what is not finished, then compare all of it with what was written.

        Raises:
          InteropError: what is on disk differs; the same command repairs it.
        """
        jobs = list(jobs)
        open_jobs = [job for job in jobs if job.key not in self.finished]
        for job, crc32, progress in _each(jobs, open_jobs, "writing", workers):
            self._append({"key": job.key, "bytes": job.bytes, "crc32": crc32})
            self.finished[job.key] = (job.bytes, crc32)
            show(progress)
        bad: list[str] = []
        for job, crc32, progress in _each(jobs, jobs, "verifying", workers):
            if crc32 != self.finished[job.key][1]:
                bad.append(job.key)
            show(progress)
        if bad:
            kept = [line for key, line in self._lines() if key not in bad]
            self._list.truncate(0)
            self._list.writelines(kept)
            self._list.flush()
            raise InteropError(
                f"{len(bad)} pieces of {self.part} are not as they were written: "
                f"{', '.join(bad[:5])}; check the disk, then run the same command, "
                "which writes them again"
            )

    def publish(self) -> None:
        """Everything is there: give the folder its name."""
        self._list.close()
        (self.part / LIST).unlink()
        if self.folder.exists():
            self.folder.rmdir()
        self.part.rename(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._list.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._list, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InteropError(f"another process is writing {self.part}") from error

    def _lines(self) -> list[tuple[str, str]]:
        """(key, line) of what is whole; the line of a kill may be cut short."""
        self._list.seek(0)
        found = []
        for line in self._list.read().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append((json.loads(line).get("key", ""), line))
        return found

    def _read(self, identity: Any) -> None:
        lines = [line for _, line in self._lines()]
        if not lines:
            self._list.truncate(0)
            self._append({"identity": identity})
            return
        if json.loads(lines[0]).get("identity") != identity:
            raise InteropError(
                f"{self.part} is the unfinished result of another conversion, or its "
                "source has changed since; remove that folder to start anew"
            )
        self._list.truncate(sum(len(line.encode()) for line in lines))
        for line in lines[1:]:
            record = json.loads(line)
            self.finished[record["key"]] = (record["bytes"], record["crc32"])

    def _append(self, record: Mapping[str, Any]) -> None:
        # One short write to a file open for appending: whole, or cut short at the end.
        self._list.write(json.dumps(record) + "\n")
        self._list.flush()


def _each(
    jobs: list[Job], todo: list[Job], phase: str, workers: int
) -> Iterator[tuple[Job, int, Progress]]:
    """(job, CRC-32, progress) of `todo`, which is some of `jobs`, as they finish."""
    total, started = sum(job.bytes for job in jobs), time.monotonic()
    skipped = done = total - sum(job.bytes for job in todo)
    waiting, running = collections.deque(todo), {}
    pool = ThreadPoolExecutor(workers)
    try:
        while waiting or running:
            # No more at a time than threads: each holds a tensor.
            while waiting and len(running) < workers:
                job = waiting.popleft()
                do = job.write if phase == "writing" else job.check
                running[pool.submit(do)] = job
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                job = running.pop(future)
                done += job.bytes
                seconds = time.monotonic() - started
                progress = Progress(phase, done, total, skipped, seconds)
                yield job, future.result(), progress
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
