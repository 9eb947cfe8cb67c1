"""Where the time of a run goes: into its steps, into waiting for data, or elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from kimi_jax.monitor.metrics import Record

T = TypeVar("T")


class Lap(NamedTuple):
    """Seconds since the last lap."""

    steps: float  # of training, waits for data included
    waited: float  # for the next batch


class Clock:
    """Times the steps of a run, over all of its sessions.

    It runs from `start` or the last lap on, and stands still inside of `stopped`.
    """

    def __init__(
        self,
        began: float,
        productive: float = 0.0,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          began: when the run did, in seconds since the epoch.
          productive: seconds in the steps of earlier sessions.
          wall, monotonic: clocks; tests pass their own.
        """
        self._began, self._productive = began, productive
        self._wall, self._monotonic = wall, monotonic
        self._steps = self._waited = 0.0
        self._since = monotonic()

    def start(self) -> None:
        """Now the first step begins."""
        self._steps = self._waited = 0.0
        self._since = self._monotonic()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens within belongs to no step."""
        self._steps += self._monotonic() - self._since
        try:
            yield
        finally:
            self._since = self._monotonic()

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """`batches`, with note taken of the time that each makes the loop wait."""
        iterator = iter(batches)
        while True:
            asked = self._monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += self._monotonic() - asked
            yield batch

    def lap(self) -> Lap:
        """What the steps since the last lap took."""
        now = self._monotonic()
        lap = Lap(self._steps + now - self._since, self._waited)
        self._steps = self._waited = 0.0
        self._since = now
        self._productive += lap.steps
        return lap

    @property
    def productive(self) -> float:
        """Seconds in steps since the run began, up to the last lap."""
        return self._productive

    @property
    def productive_share(self) -> float:
        """Of the wall time since the run began, pauses between sessions included."""
        elapsed = self._wall() - self._began
        return min(1.0, self._productive / elapsed) if elapsed > 0 else 0.0


def clock_of(records: Iterable[Record], wall: Callable[[], float] = time.time) -> Clock:
    """The clock of the run that left `records`; of one that begins now without any."""
    began, productive = None, 0.0
    for record in records:
        began = record["time"] if began is None else began
        productive = record.get("productive_seconds", productive)
    return Clock(wall() if began is None else began, productive, wall=wall)
