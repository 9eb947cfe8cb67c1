"""Several benchmarks on one machine at a time: all may compile, one measures."""

import fcntl
import pathlib
from typing import IO

from kimi_jax import distributed

SECONDS = 600  # that a process waits for its turn


class Turns:
    """A lock file that benchmarks share; without a path every turn is at once.

    The leader of several processes holds it for all.
    """

    def __init__(self, path: str):
        self._file: IO[str] | None = None
        if path and distributed.is_leader():
            self._file = pathlib.Path(path).open("w")  # noqa: SIM115

    def together(self) -> None:
        """From here on this one compiles: it disturbs no other that does."""
        self._take(fcntl.LOCK_SH)

    def alone(self) -> None:
        """Returns when no other compiles or measures; until `together` none will."""
        self._take(fcntl.LOCK_EX)

    def _take(self, kind: int) -> None:
        def take() -> None:
            if self._file is not None:
                fcntl.flock(self._file, kind)

        distributed.on_leader("turn", take, timeout=SECONDS)
