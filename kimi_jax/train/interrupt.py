"""Ctrl-C and SIGTERM as a request that the loop can honour between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """Context manager; `requested` names the signal that arrived, if any.

    An exception in the middle of a step could leave donated buffers behind, so the
    first signal only asks. A second one, of either kind, acts at once, as it would
    without this class.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
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

    @property
    def exit_code(self) -> int:
        """128 + signal number, the shell's convention; 0 if nothing arrived."""
        return 0 if self.requested is None else 128 + self.requested

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
