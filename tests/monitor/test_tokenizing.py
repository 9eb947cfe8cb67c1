"""The lines that tell how far tokenising has come."""

import io

from rich.console import Console

from kimi_jax.data.build_store import Progress
from kimi_jax.monitor.tokenizing import tokenizing_lines


def test_a_line_every_five_seconds():
    times = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    output = io.StringIO()
    show = tokenizing_lines(Console(file=output), "[a].jsonl", lambda: next(times))
    for step, eta in enumerate((None, 90.0, 85.0, 80.0)):
        show(Progress(step, 4, 100 * step, 1000, 1000 * step, 6_000_000 * step, eta))
    assert output.getvalue() == (
        "tokenising [a].jsonl: 10.0%, file 2 of 4, 1,000 documents, 6,000,000 tokens, "
        "1.00M tok/s, ETA 1:30\n"
        "tokenising [a].jsonl: 30.0%, file 4 of 4, 3,000 documents, 18,000,000 tokens, "
        "1.50M tok/s, ETA 1:20\n"
    )
