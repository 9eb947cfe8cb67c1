"""What is printed while a source is tokenised."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from kimi_jax.data.build_store import Progress
from kimi_jax.monitor.console import format_rate, format_seconds

_SECONDS = 5.0


def tokenizing_lines(
    console: Console, source: str, clock: Callable[[], float] = time.monotonic
) -> Callable[[Progress], None]:
    """A callback for `build_store`: a line every five seconds."""
    started = last = clock()
    first: Progress | None = None

    def show(progress: Progress) -> None:
        nonlocal last, first
        first = first or progress
        now = clock()
        if now - last < _SECONDS:
            return
        last = now
        share = progress.bytes_read / max(1, progress.bytes_total)
        rate = (progress.tokens - first.tokens) / (now - started)
        console.print(
            f"tokenising {source or 'the default corpus'}: {share:.1%}, file "
            f"{min(progress.shards_done + 1, progress.shards)} of {progress.shards}, "
            f"{progress.documents:,} documents, {progress.tokens:,} tokens, "
            f"{format_rate(rate)} tok/s, ETA {format_seconds(progress.eta_seconds)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    return show
