"""What a run prints: a first screen, phases, one line a log step, and an ETA.

On a terminal, progress is one live display that is redrawn in place; evaluations and
phases scroll by above it. Anywhere else (a log file, a pipe, a dumb terminal) the same
facts are plain lines: one for each log step, labelled so that grep finds them, and
never a progress bar. Phases are printed when they begin, with the time since the start,
so that the last line of a hung run says where it hangs.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

Sections = Sequence[tuple[str, Sequence[Sequence[object]]]]

# The ETA averages over this many log steps: enough to hold an evaluation and a
# checkpoint now and then, few enough to follow a change of speed.
_ETA_WINDOW = 16
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?")
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48


def is_live(console: Console) -> bool:
    """Whether `console` can redraw in place: a terminal, and not a dumb one."""
    return console.is_terminal and not console.is_dumb_terminal


def print_first_screen(console: Console, sections: Sections) -> None:
    """Print titled tables: rich ones on a terminal, aligned plain lines elsewhere.

    Args:
        console: where to print.
        sections: pairs of a title and rows. A row is a sequence of cells; integers
            get thousands separators. Columns of numbers align right, also under a
            first row of words.

    Raises:
        ValueError: the rows of a section differ in length.
    """
    for title, rows in sections:
        widths = {len(row) for row in rows}
        if len(widths) > 1:
            raise ValueError(
                f"section {title!r}: rows must have equal lengths, got {sorted(widths)}"
            )
        cells = [[_cell(value) for value in row] for row in rows]
        if is_live(console):
            console.print(Text(title, style="bold"))
            if cells:
                console.print(_rich_table(cells))
        else:
            for line in (title, *_plain_table(cells), ""):
                _print_plain(console, line)


class Progress:
    """Shows the records of a run as they come; a context manager.

    Leaving the context stops the live display, so that a traceback or the next prompt
    starts on a clean line. Anything else printed to the same console meanwhile appears
    above the display.
    """

    def __init__(
        self,
        console: Console,
        unigram_bits_per_byte: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        curve: str = "bits_per_byte",
    ):
        """Prepare; nothing is printed yet.

        Args:
            console: where to print.
            unigram_bits_per_byte: entropy of the byte unigrams of the validation
                text, in bits, to print beside each evaluation.
            clock: seconds from any origin; tests pass their own.
            curve: the number of the records that the live display draws.
        """
        self._console = console
        self._curve_name = curve
        self._unigram = unigram_bits_per_byte
        self._clock = clock
        self._start = self._last_event = clock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_ETA_WINDOW + 1)
        self._curve: list[float] = []
        self._train: Mapping[str, Any] | None = None
        self._eval: Mapping[str, Any] | None = None
        self._steps = (0, 0)
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def note(self, message: str) -> None:
        """Print a phase or event, e.g. "compiling the train step ...", at once."""
        self._touch()
        elapsed = self._last_event - self._start
        self._print(f"[{elapsed:7.1f} s] {message}", style="dim")

    def warn(self, message: str) -> None:
        """Print something that asks for attention, at once."""
        self._touch()
        self._print(f"warning: {message}", style="bold yellow")

    def update(
        self, record: Mapping[str, Any], steps_done: int, steps_total: int
    ) -> None:
        """Show a "train" or "eval" record; fields that it lacks are left out.

        Args:
            record: as returned by `MetricsWriter.write`.
            steps_done: optimizer steps completed, counting those before a resume.
            steps_total: optimizer steps of the whole run.
        """
        self._touch()
        self._steps = (steps_done, steps_total)
        if record["kind"] == "eval":
            self._eval = record
            style = "bold cyan"
            self._print(self._line("eval", self._eval_fields(record)), style=style)
            return
        self._train = record
        self._marks.append((self._last_event, steps_done))
        numbers = {**record, **record.get("rl", {})}
        if self._curve_name in numbers:
            self._curve.append(numbers[self._curve_name])
        if self._live is None:
            fields = [*_train_fields(record), f"ETA {format_seconds(self.eta()):>7}"]
            self._print(self._line("step", fields))

    def eta(self) -> float | None:
        """Seconds to the last step, from the recent log steps; None when unknown.

        The clock starts at the first record, so compilation does not count; pauses
        between log steps (evaluation, checkpoints) do.
        """
        done, total = self._steps
        if done >= total:
            return 0.0
        if len(self._marks) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = (
            self._marks[0],
            self._marks[-1],
        )
        if last_step <= first_step:
            return None
        pace = (last_time - first_time) / (last_step - first_step)
        return pace * (total - last_step)

    def close(self) -> None:
        """Stop the live display, leaving its last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        if is_live(self._console):
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _touch(self) -> None:
        self._last_event = self._clock()

    def _print(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._console.print(Text(line, style=style))
        else:
            _print_plain(self._console, line)

    def _line(self, label: str, fields: Sequence[str]) -> str:
        done, total = self._steps
        return "  ".join([f"{label} {done:>{len(str(total))}}/{total}", *fields])

    def _eval_fields(self, record: Mapping[str, Any]) -> list[str]:
        fields = []
        if "loss" in record:
            fields.append(f"val loss {record['loss']:.4f}")
        if "bits_per_byte" in record:
            fields.append(f"val bpb {record['bits_per_byte']:.4f}")
        if "success" in record.get("rl", {}):
            fields.append(f"held-out success {record['rl']['success']:.1%}")
        if "accuracy" in record:
            fields.append(f"accuracy {record['accuracy']:.4f}")
        for length, other in list(record.get("lengths", {}).items())[1:]:
            name = "accuracy" if "accuracy" in other else "bits_per_byte"
            fields.append(f"at {length} {other[name]:.4f}")
        if self._unigram is not None and "bits_per_byte" in record:
            fields.append(f"(byte unigrams {self._unigram:.4f})")
        return fields

    def _render(self) -> RenderableType:
        idle = format_seconds(self._clock() - self._last_event)
        if self._train is None:
            status = Table.grid(padding=(0, 1))
            status.add_row(self._spinner, Text(f"{idle} since the last line"))
            return status
        done, total = self._steps
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"step {done}/{total}", style="bold"),
            ProgressBar(total=max(total, 1), completed=done, width=32),
            Text(f"ETA {format_seconds(self.eta())}"),
            Text(f"last log step {idle} ago", style="dim"),
        )
        lines: list[RenderableType] = [head]
        lines.append(Text("  ".join(_train_fields(self._train))))
        if self._eval is not None:
            lines.append(Text("  ".join(self._eval_fields(self._eval)), style="cyan"))
        name = self._curve_name.replace("_", " ")
        lines.append(Text(f"{name} {sparkline(self._curve)}", style="dim"))
        return Group(*lines)


def format_seconds(seconds: float | None) -> str:
    """`1:02:03` or `2:03`; `--:--` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_rate(value: float) -> str:
    """Three significant digits with k, M or G: `13.4k`."""
    if not math.isfinite(value):
        return str(value)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.{_decimals(value / scale)}f}{suffix}"
    return f"{value:.{_decimals(value)}f}"


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The finite values as one line of block characters, oldest first."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    picked = [finite[(i + 1) * len(finite) // count - 1] for i in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in picked)


def _train_fields(record: Mapping[str, Any]) -> list[str]:
    formats: dict[str, Callable[[float], str]] = {
        "loss": lambda x: f"loss {x:7.4f}",
        "bits_per_byte": lambda x: f"bpb {x:7.4f}",
        "learning_rate": lambda x: f"lr {x:8.2e}",
        "gradient_norm": lambda x: f"grad norm {x:8.3g}",
        "tokens_per_second": lambda x: f"{format_rate(x):>5} tok/s",
        "mfu": lambda x: f"MFU {x:6.1%}",
    }
    fields = [show(record[name]) for name, show in formats.items() if name in record]
    fields += _rl_fields(record.get("rl", {}))
    violations = record.get("layers", {}).get("moe/max_violation")
    if violations:
        # NaN first: max() would hide it or not depending on the order.
        worst = math.nan if any(map(math.isnan, violations)) else max(violations)
        fields.append(f"worst MaxVio {worst:6.3f}")
    return fields


def _rl_fields(numbers: Mapping[str, Any]) -> list[str]:
    """Of an iteration of reinforcement learning."""
    formats = {
        "success": "success {:5.1%}",
        "reward": "reward {:6.3f}",
        "turns": "turns {:4.1f}",
        "zero_variance": "alike {:4.0%}",
        "policy_kl": "kl {:8.1e}",
        "clip_share": "clipped {:5.1%}",
        "mismatch": "mismatch {:7.1e}",
        "rollout_seconds": "rollout {:.1f} s",
        "learn_seconds": "learn {:.1f} s",
    }
    return [form.format(numbers[k]) for k, form in formats.items() if k in numbers]


def _decimals(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _alignments(cells: Sequence[Sequence[str]]) -> list[Literal["left", "right"]]:
    """Right for columns of numbers; from three rows on, the first may be a heading."""
    body = cells[1:] if len(cells) > 2 else cells
    return [
        "right" if all(map(_NUMBER.fullmatch, column)) else "left"
        for column in zip(*body, strict=True)
    ]


def _rich_table(cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.ROUNDED, border_style="dim", show_header=False)
    for index, side in enumerate(_alignments(cells)):
        style = "cyan" if index == 0 else ""
        table.add_column(justify=side, style=style, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _plain_table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = _alignments(cells)
    lines = []
    for row in cells:
        padded = [
            text.rjust(width) if side == "right" else text.ljust(width)
            for text, side, width in zip(row, sides, widths, strict=True)
        ]
        lines.append("  " + "  ".join(padded).rstrip())
    return lines


def _print_plain(console: Console, line: str) -> None:
    # Records are lines: no wrapping at 80 columns, no markup, no emoji codes.
    console.print(Text(line), soft_wrap=True)
