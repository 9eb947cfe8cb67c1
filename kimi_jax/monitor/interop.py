"""What is printed while a checkpoint is converted."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from kimi_jax.interop.staging import Progress
from kimi_jax.monitor.console import format_rate, format_seconds

_SECONDS = 5.0


def conversion_lines(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Callable[[Progress], None]:
    """A callback for `Staging.run`: a line every five seconds, and at an end."""
    last, begun = clock(), ""

    def show(progress: Progress) -> None:
        nonlocal last, begun
        if progress.skipped and not begun:
            console.print(
                f"going on: {format_rate(progress.skipped)}B are there already",
                highlight=False,
                markup=False,
            )
        begun = progress.phase
        now = clock()
        if now - last < _SECONDS and progress.done < progress.total:
            return
        last = now
        console.print(
            f"{progress.phase}: {progress.done / max(1, progress.total):.1%} of "
            f"{format_rate(progress.total)}B, {format_rate(progress.rate)}B/s, ETA "
            f"{format_seconds(progress.eta_seconds)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    return show
