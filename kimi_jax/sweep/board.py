"""What a sweep prints while it runs: a live table, or a line for each event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kimi_jax.monitor.console import format_seconds, is_live
from kimi_jax.sweep.local import Job
from kimi_jax.sweep.settings import Setting, describe
from kimi_jax.sweep.state import Progress

_ROWS = 40
# What is shown first where there is no room for all.
_ORDER = ("running", "failed", "stopped", "finished", "new")
_STYLES = {"running": "bold cyan", "failed": "bold red", "finished": "green"}


class Board:
    """The progress of all runs of a sweep; a context manager."""

    def __init__(
        self,
        console: Console,
        settings: Sequence[Setting],
        progress: Mapping[str, Progress],
    ):
        self._console = console
        self._settings = {setting.id: setting for setting in settings}
        self._progress = dict(progress)
        self._live: Live | None = None
        self.eta: Callable[[], float | None] = lambda: None

    def watch(self, job: Job, now: Progress) -> None:
        """Takes note; prints a line if a run has begun or ended and nothing is live."""
        before = self._progress[job.id].status
        self._progress[job.id] = now
        if self._live is not None or before == now.status:
            return
        words = [f"{job.id} {now.status}"]
        if now.status == "running":
            words.append(job.label)
        if now.validation is not None:
            words.append(f"val bpb {now.validation:.4f}")
        words += [now.reason] if now.reason else []
        if now.status != "running":
            words.append(f"ETA {format_seconds(self.eta())}")
        self._console.print(Text("  ".join(words)), soft_wrap=True)

    def table(self) -> RenderableType:
        """The runs and how many there are of each kind."""
        return Group(runs_table(self._settings, self._progress), self._summary())

    def __enter__(self) -> Self:
        if is_live(self._console):
            self._live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _summary(self) -> Text:
        return Text(f"{count(self._progress)}  ETA {format_seconds(self.eta())}")


def count(progress: Mapping[str, Progress]) -> str:
    """ "2 running, 1 failed, 5 new"."""
    found = [run.status for run in progress.values()]
    return ", ".join(f"{found.count(s)} {s}" for s in _ORDER if s in found)


def runs_table(
    settings: Mapping[str, Setting], progress: Mapping[str, Progress]
) -> Table:
    """A row for each run; the liveliest where there are too many."""
    table = Table(box=box.ROUNDED, border_style="dim")
    for name in ("run", "setting", "state"):
        table.add_column(name, overflow="fold")
    for name in ("step", "loss", "val bpb"):
        table.add_column(name, justify="right")
    ids = sorted(settings, key=lambda run: _ORDER.index(progress[run].status))
    for run in ids[:_ROWS]:
        now, setting = progress[run], settings[run]
        words = f"{now.status}: {now.reason}" if now.reason else now.status
        table.add_row(
            run,
            Text(describe(setting.swept)),
            Text(words, style=_STYLES.get(now.status, "")),
            f"{now.step}/{setting.config.train.steps}",
            "" if now.loss is None else f"{now.loss:.4f}",
            "" if now.validation is None else f"{now.validation:.4f}",
        )
    if len(ids) > _ROWS:
        table.caption = f"and {len(ids) - _ROWS} more"
    return table
