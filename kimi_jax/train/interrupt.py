"""Ctrl-C and SIGTERM as a request that the loop can honour between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax

from kimi_jax import distributed


class Interrupt:
    """Context manager; `requested` names the signal that arrived, if any.

    An exception in the middle of a step could leave donated buffers behind, so the
    first signal only asks. A second one, of either kind, acts at once, as it would
    without this class.

    Args:
      first: what is finished before the run stops, told at the first signal; "": say
        nothing.
    """

    def __init__(self, first: str = "") -> None:
        self.requested: signal.Signals | None = None
        self._first = first
        self._asked: Any = 0  # the last vote, perhaps still on the devices
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; elsewhere signals keep their meaning.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def agreed(self) -> signal.Signals | None:
        """The signal at which all processes stop after this step; they all call it.

        One alone stops at once. Several vote, and read the vote of the step before,
        which is there by then, so that asking never makes the devices wait.
        """
        if jax.process_count() == 1:
            return self.requested
        before, self._asked = self._asked, distributed.largest(self.requested or 0)
        return signal.Signals(int(before)) if int(before) else None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        self._give_back()
        if self._first:
            # A handler may have interrupted a print; a buffered one could not follow.
            name = self.requested.name
            said = f"{name}: stops after {self._first}, which is saved; again: at once"
            os.write(2, f"\n{said}\n".encode())

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
