"""A trajectory for people: on a terminal, or as a page of HTML.

Roles have colours. Each turn of the policy has a line with its reward, its advantage
and the log-probabilities of its tokens, and each of its tokens is shaded by how
unlikely it was.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from kimi_jax.environments.format import Format
from kimi_jax.rl.archive import Entry
from kimi_jax.rl.trajectory import Turn

# Role -> style on a terminal, colour on a page.
_COLORS = {
    "system": ("dim", "#6b7280"),
    "user": ("cyan", "#0e7490"),
    "tool": ("yellow", "#a16207"),
    "assistant": ("bold green", "#15803d"),
}
_UNLIKELY = -3.0  # nats: where the shade is full
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Trajectories</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; }}
section {{ border: 1px solid #e5e7eb; border-radius: 6px; padding: 0 1em 1em;
  margin: 1.5em 0; }}
pre {{ white-space: pre-wrap; margin: .2em 0; padding-left: .6em;
  border-left: 3px solid; }}
small {{ color: #6b7280; }}
</style></head><body>
<h1>Trajectories</h1>
<p>The redder a token of the policy, the less likely it was when it was drawn.</p>
{sections}
</body></html>
"""


class Span(NamedTuple):
    """Tokens of one role."""

    role: str
    tokens: list[int]
    logprobs: list[float]  # of the policy's tokens; empty for others
    turn: int | None  # its number, for the policy's


def spans(entry: Entry, form: Format) -> Iterator[Span]:
    """The tokens of a trajectory in order, cut where the speaker changes."""
    trajectory = entry.trajectory
    names = {token: role for role, token in form.roles.items()}
    role, at, drawn = "system", 0, 0
    for number, turn in enumerate(trajectory.turns):
        for span in _outside(trajectory.tokens[at : turn.start], names, role):
            role = span.role
            yield span
        count = turn.stop - turn.start
        logprobs = trajectory.logprobs[drawn : drawn + count]
        yield Span(
            "assistant", trajectory.tokens[turn.start : turn.stop], logprobs, number
        )
        role, at, drawn = "assistant", turn.stop, drawn + count
    yield from _outside(trajectory.tokens[at:], names, role)


def to_text(entry: Entry, form: Format) -> Text:
    """For a terminal."""
    text = Text(headline(entry) + "\n", style="bold")
    for span in spans(entry, form):
        style = _COLORS[span.role][0]
        if span.turn is None:
            text.append(f"[{span.role}] ", style="dim")
            text.append(form.text_of(span.tokens) + "\n", style=style)
            continue
        text.append(f"[turn {span.turn + 1}] {_about_turn(entry, span)}\n", style="dim")
        text.append(form.text_of(span.tokens) + "\n", style=style)
    return text


def to_html(entries: Sequence[Entry], form: Format) -> str:
    """A page that needs nothing else."""
    sections = "\n".join(_section(entry, form) for entry in entries)
    return _PAGE.format(sections=sections)


def headline(entry: Entry) -> str:
    """Task, outcome and size in one line."""
    trajectory = entry.trajectory
    task = trajectory.task
    outcome = "success" if trajectory.success else f"no success ({_ending(entry)})"
    return (
        f"{task.environment} difficulty {task.difficulty} length {task.length:,} seed "
        f"{task.seed}  group {trajectory.group} member {trajectory.member}  {outcome}  "
        f"reward {trajectory.reward:.3f}  {len(trajectory.turns)} turns  "
        f"{len(trajectory.tokens):,} tokens, {len(trajectory.logprobs):,} drawn"
    )


def _ending(entry: Entry) -> str:
    errors = [str(t.info["error"]) for t in entry.trajectory.turns if "error" in t.info]
    return errors[-1] if errors else f"ended by {entry.trajectory.finished}"


def _outside(tokens: Sequence[int], names: dict[int, str], role: str) -> Iterator[Span]:
    """Spans of what others said; a token that opens a role begins one."""
    starts = [i for i, token in enumerate(tokens) if token in names]
    edges = [0, *[i for i in starts if i], len(tokens)]
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        role = names.get(tokens[start], role)
        # A role that is opened and not used belongs to the turn that follows.
        if not (role == "assistant" and stop == len(tokens)):
            yield Span(role, list(tokens[start:stop]), [], None)


def _about_turn(entry: Entry, span: Span) -> str:
    assert span.turn is not None
    turn: Turn = entry.trajectory.turns[span.turn]
    parts = [f"reward {turn.reward:+.3f}"]
    if entry.advantages:
        parts.append(f"advantage {entry.advantages[span.turn]:+.3f}")
    if span.logprobs:
        worst = int(np.argmin(span.logprobs))
        parts.append(
            f"{len(span.tokens)} tokens, mean log p {np.mean(span.logprobs):.3f}, "
            f"least {span.logprobs[worst]:.2f} at token {worst + 1}"
        )
    return "  ".join(parts)


def _section(entry: Entry, form: Format) -> str:
    blocks = [f"<h3>{html.escape(headline(entry))}</h3>"]
    for span in spans(entry, form):
        color = _COLORS[span.role][1]
        label = span.role
        body = html.escape(form.text_of(span.tokens))
        if span.turn is not None:
            label = f"turn {span.turn + 1}: {_about_turn(entry, span)}"
            body = "".join(_shaded(span, form))
        blocks.append(f"<small>{html.escape(label)}</small>")
        blocks.append(f'<pre style="border-color:{color}">{body}</pre>')
    return "<section>" + "\n".join(blocks) + "</section>"


def _shaded(span: Span, form: Format) -> Iterator[str]:
    for token, logprob in zip(span.tokens, span.logprobs, strict=True):
        shade = min(1.0, max(0.0, logprob / _UNLIKELY))
        yield (
            f'<span title="log p {logprob:.3f}" style="background:'
            f'rgba(220,38,38,{0.6 * shade:.2f})">'
            f"{html.escape(form.text_of([token]))}</span>"
        )
