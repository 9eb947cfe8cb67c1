"""A folder or file that belongs to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

from kimi_jax.errors import UserError


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], taken: str) -> Iterator[IO[str]]:
    """Holds the lock file `path`, which ends with the process, even by a kill.

    Args:
      taken: what to say if another process holds it.

    Raises:
      UserError: another process holds it.
    """
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(taken) from error
        yield lock
