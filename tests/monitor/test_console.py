"""What is printed, on a terminal and into a file."""

import io
import math

import pytest
from rich.console import Console

from kimi_jax.monitor.console import (
    Progress,
    format_rate,
    format_seconds,
    is_live,
    print_first_screen,
    sparkline,
)

SECTIONS = [
    ("Parameters by part", [("embedding", 65_536), ("experts [moe]", 2_345_678)]),
    ("Where results go", [("workdir", "/runs/" + "x" * 120)]),
]


def plain_console() -> Console:
    return Console(file=io.StringIO())


def terminal(term: str = "xterm") -> Console:
    environment = {"TERM": term, "COLUMNS": "120", "LINES": "40"}
    return Console(file=io.StringIO(), force_terminal=True, _environ=environment)


def train_record(step: int, **changes) -> dict:
    record = {
        "kind": "train",
        "step": step,
        "loss": 2.0 + 1.0 / step,
        "bits_per_byte": 2.9 + 1.0 / step,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens_per_second": 13_412.0,
        "layers": {"moe/max_violation": [0.25, 0.75, 0.5]},
    }
    return record | changes


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_first_screen_in_a_file_is_plain_and_unwrapped():
    console = plain_console()
    print_first_screen(console, SECTIONS)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "Parameters by part"
    assert lines[1] == "  embedding         65,536"
    assert lines[2] == "  experts [moe]  2,345,678"
    assert lines[4:6] == ["Where results go", "  workdir  /runs/" + "x" * 120]
    assert console.file.getvalue().isascii()


def test_first_screen_on_a_terminal_is_a_table():
    console = terminal()
    print_first_screen(console, SECTIONS)
    text = console.file.getvalue()
    assert "╭" in text and "2,345,678" in text and "experts [moe]" in text


def test_numbers_align_right_under_a_heading():
    console = plain_console()
    rows = [("part", "total", "share"), ("kda", "1,203", 0.25), ("all", 45_678, 1)]
    print_first_screen(console, [("Parameters", rows)])
    assert console.file.getvalue().splitlines()[1:4] == [
        "  part   total  share",
        "  kda    1,203   0.25",
        "  all   45,678      1",
    ]


@pytest.mark.parametrize("console", [plain_console(), terminal()], ids=["file", "tty"])
def test_first_screen_edge_cases(console):
    print_first_screen(console, [("Empty", []), ("Mixed", [("a", 1), ("b", "text")])])
    assert "Empty" in console.file.getvalue()
    with pytest.raises(
        ValueError, match=r"section 'Bad': rows must have equal lengths"
    ):
        print_first_screen(console, [("Bad", [("a",), ("b", 1)])])


def test_log_lines_in_a_file():
    console, clock = plain_console(), Clock()
    with Progress(console, unigram_bits_per_byte=4.7712, clock=clock) as progress:
        clock.now += 1.5
        progress.note("compiling the train step ...")
        clock.now += 40.0
        for step in range(10, 40, 10):
            progress.update(train_record(step), step, 1000)
            clock.now += 5.0
        evaluation = {"kind": "eval", "step": 30, "loss": 2.1, "bits_per_byte": 3.03}
        progress.update(evaluation, 30, 1000)
        assert progress.eta() == pytest.approx(0.5 * 970)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "[    1.5 s] compiling the train step ..."
    assert len(lines) == 5
    steps, evaluation = lines[1:4], lines[4]
    assert len({len(line) for line in steps}) == 1
    assert steps[0].startswith("step   10/1000  loss  2.1000  bpb  3.0000  lr 1.00e-03")
    assert "grad norm      0.5  13.4k tok/s  worst MaxVio  0.750" in steps[0]
    # One record is compilation; the pace is known from the second on.
    assert steps[0].endswith("--:--")
    assert steps[1].endswith("8:10") and steps[2].endswith("8:05")
    assert evaluation == (
        "eval   30/1000  val loss 2.1000  val bpb 3.0300  (byte unigrams 4.7712)"
    )
    assert "\x1b" not in console.file.getvalue()


def test_fields_that_a_record_lacks_are_left_out():
    console = plain_console()
    with Progress(console) as progress:
        progress.update({"kind": "train", "step": 1, "loss": math.nan}, 1, 1)
        progress.update({"kind": "eval", "step": 1, "bits_per_byte": 3.0}, 1, 1)
        bad = train_record(1, layers={"moe/max_violation": [0.1, math.nan]})
        progress.update(bad, 1, 1)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "step 1/1  loss     nan  ETA    0:00"
    assert lines[1] == "eval 1/1  val bpb 3.0000"
    assert "worst MaxVio    nan" in lines[2]


def test_eta_follows_recent_steps_only():
    clock = Clock()
    progress = Progress(plain_console(), clock=clock)
    assert progress.eta() == 0.0
    clock.now += 300.0  # compilation
    for step in range(1, 101):
        progress.update(train_record(step), step, 200)
        clock.now += 10.0 if step < 60 else 1.0
    assert progress.eta() == pytest.approx(100.0)
    # A resumed run counts from where it is.
    resumed = Progress(plain_console(), clock=clock)
    for step in (501, 502):
        resumed.update(train_record(step), step, 1000)
        clock.now += 2.0
    assert resumed.eta() == pytest.approx(2.0 * 498)
    resumed.update(train_record(502), 502, 1000)
    assert resumed.eta() is not None


def test_a_terminal_shows_each_fact_once():
    console, clock = terminal(), Clock()
    with Progress(console, unigram_bits_per_byte=4.7712, clock=clock) as progress:
        progress.note("compiling the train step ...")
        progress.update(train_record(1), 1, 3)
        progress.update(train_record(2), 2, 3)
        clock.now += 7.0
        evaluation = {"kind": "eval", "step": 2, "loss": 2.1, "bits_per_byte": 3.03}
        progress.update(evaluation, 2, 3)
        progress.update(train_record(3), 3, 3)
    text = console.file.getvalue()
    assert text.count("compiling the train step ...") == 1
    # No scrolling line for a train record: only the live display shows it.
    assert "worst MaxVio" in text and "step 1/3  loss" not in text
    assert text.count("eval 2/3") == 1
    # The last state stays on the screen and the cursor comes back.
    assert "loss  2.3333" in text.rsplit("eval 2/3", 1)[1]
    assert text.rstrip().endswith("\x1b[?25h")


def test_an_error_stops_the_live_display():
    console = terminal()
    with pytest.raises(RuntimeError), Progress(console) as progress:
        progress.note("loading ...")
        raise RuntimeError
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")
    progress.update(train_record(1), 1, 2)
    assert "step 1/2  loss" in console.file.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    console = terminal("dumb")
    assert not is_live(console)
    with Progress(console) as progress:
        progress.update(train_record(1), 1, 2)
    assert console.file.getvalue().startswith("step 1/2  loss")


def test_formats():
    assert format_seconds(0) == "0:00"
    assert format_seconds(59.6) == "1:00"
    assert format_seconds(3723) == "1:02:03"
    assert format_seconds(None) == format_seconds(math.inf) == "--:--"
    assert format_rate(0.5) == "0.50"
    assert format_rate(999.4) == "999"
    assert format_rate(999.6) == "1.00k"
    assert format_rate(13_412) == "13.4k"
    assert format_rate(2.5e6) == "2.50M"
    assert format_rate(math.nan) == "nan"
    assert sparkline([]) == "" and sparkline([math.nan]) == ""
    assert sparkline([1.0, 2.0, math.inf]) == "▁█"
    assert sparkline([3.0] * 3) == "▁▁▁"
    assert len(sparkline(list(range(1000)), width=10)) == 10
