"""The pieces of Markdown that a report is made of."""

import json
from collections.abc import Sequence
from typing import Any

from kimi_jax.monitor.metrics import to_jsonable


def number(value: Any, form: str = "{:.4f}") -> str:
    """`value` in the form given if it is a number, else as text; "-" for None."""
    if value is None:
        return "-"
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return form.format(value) if numeric else cell(str(value))


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:"
) -> list[str]:
    """The lines of a table; `align` is for all columns but the first."""
    rule = ["---", *[align] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def cell(text: str) -> str:
    """Text that stays within its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: Any) -> str:
    """A value as inline code."""
    text = value if isinstance(value, str) else json.dumps(to_jsonable(value))
    # A longer delimiter than any run of backticks inside, as in _fence.
    tick = "`" * (_longest_run(text) + 1)
    pad = " " if "`" in text else ""
    return f"{tick}{pad}{cell(text)}{pad}{tick}" if text.strip() else "(empty)"


def fence(text: str, language: str) -> str:
    """A block of code, whatever it holds."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _longest_run(text: str) -> int:
    longest = current = 0
    for character in text:
        current = current + 1 if character == "`" else 0
        longest = max(longest, current)
    return longest
