"""Tasks by name: "mqar:length=256:pairs=16".

A spec is a name and dials, colons between them. A value that is a list, slashes
between its items, stands for one task each: "needle:length=1K/4K:depth=0/0.5/1" are
six. K and M are 1024 and 1024^2. In a list of specs commas lie between them. "recall",
"state" and "ruler" stand for each task of their kind: "ruler:length=4K".
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kimi_jax.errors import UserError
from kimi_jax.tasks.example import Task
from kimi_jax.tasks.needles import Needle
from kimi_jax.tasks.questions import Questions
from kimi_jax.tasks.recall import MQAR, Copy, Palindrome
from kimi_jax.tasks.state import Permutations, Stack
from kimi_jax.tasks.text import Text
from kimi_jax.tasks.tracing import CommonWords, FrequentWords, Variables

# Name -> generator, and the dials in which it differs from the generator's own values.
TASKS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "mqar": (MQAR, {}),
    "copy": (Copy, {}),
    "palindrome": (Palindrome, {}),
    "stack": (Stack, {}),
    "permutations": (Permutations, {}),
    "needle": (Needle, {}),
    "needle_keys": (Needle, {"keys": 4}),
    "needle_values": (Needle, {"values": 4}),
    "needle_queries": (Needle, {"keys": 4, "queries": 4}),
    "variables": (Variables, {}),
    "common_words": (CommonWords, {}),
    "frequent_words": (FrequentWords, {}),
    "questions": (Questions, {}),
}
# One name for several: each of them, with the dials that are given.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "recall": ("mqar", "copy", "palindrome"),
    "state": ("stack", "permutations"),
    "ruler": (
        "needle",
        "needle_keys",
        "needle_values",
        "needle_queries",
        "variables",
        "common_words",
        "frequent_words",
        "questions",
    ),
}
_SUFFIXES = {"K": 1024, "M": 1024**2}


class Spec(NamedTuple):
    """One name with one value for each dial that was given."""

    name: str
    dials: dict[str, Any]

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{k}={v}" for k, v in self.dials.items())])


def parse(
    text: str, known: Mapping[str, Mapping[str, type]] | None = None
) -> list[Spec]:
    """The specs that `text` stands for: more than one where values are lists.

    Args:
      known: the dials of each name that is allowed; None: those of the tasks.

    Raises:
      UserError: an unknown name or dial, with the nearest one, or a value of a wrong
        kind.
    """
    known = task_dials() if known is None else known
    name, *items = text.strip().split(":")
    if name in GROUPS:
        each = (":".join([member, *items]) for member in GROUPS[name])
        return [spec for member in each for spec in parse(member, known)]
    if name not in known:
        hint = nearest(name, [*known, *GROUPS])
        raise UserError(f"task {name!r} does not exist; {hint}")
    return spread(text, name, items, known[name])


def spread(
    text: str,
    name: str,
    items: Sequence[str],
    dials: Mapping[str, type],
    what: str = "task",
) -> list[Spec]:
    """The specs of a name and its items "dial=value", one for each choice of values.

    Args:
      text: all of it, for errors, which call it a `what`.
      dials: those that are allowed, with their types.

    Raises:
      UserError: an unknown dial, with the nearest one, or a value of a wrong kind.
    """
    values: dict[str, list[Any]] = {}
    for item in items:
        dial, equals, listed = item.partition("=")
        if not equals or dial not in dials:
            hint = nearest(dial, [*dials])
            raise UserError(f"{what} {text!r}: {dial!r} is no dial of {name}; {hint}")
        kind = dials[dial]
        where = f"{what} {text!r}: {dial}"
        values[dial] = [_value(where, dial, x, kind) for x in listed.split("/")]
    return [
        Spec(name, dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def refuse_twice(found: Sequence[Spec], what: str = "task") -> None:
    """Raises UserError if a spec is named twice."""
    names = [str(spec) for spec in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{what} {twice!r} is named twice; name it once")


def parse_list(
    text: str, known: Mapping[str, Mapping[str, type]] | None = None
) -> list[Spec]:
    """The specs of a list with commas, in order, each once; see `parse`."""
    found = [spec for item in text.split(",") for spec in parse(item, known)]
    refuse_twice(found)
    return found


def make(spec: Spec, text: Text, **defaults: Any) -> Task:
    """The generator of `spec`.

    Args:
      text: tokenizer and haystack of tasks of text.
      defaults: dials where the spec says nothing, such as length.

    Raises:
      UserError: the dials do not go together, or the tokenizer has no room for the
        symbols of the task; all problems at once.
    """
    kind, preset = TASKS[spec.name]
    dials = {**preset, **defaults, **spec.dials}
    needs_text = "text" in _fields(kind)
    task: Task = kind(**dials, **({"text": text} if needs_text else {}))
    own, vocabulary = task.problems(), vocabulary_problems(task, text)
    # Text is encoded to see whether it fits; symbols are counted once dials are right.
    first, second = (vocabulary, own) if needs_text else (own, vocabulary)
    problems = list(first) or list(second)
    if problems:
        raise UserError(f"task {spec}: {'; '.join(problems)}")
    return task


def vocabulary_problems(task: Task, text: Text) -> Iterator[str]:
    """Symbols must not be the tokenizer's special tokens."""
    tokenizer = text.tokenizer
    if task.family in ("recall", "state"):
        room = min(tokenizer.pad, tokenizer.bos, tokenizer.eod)
        if task.vocab_size > room:
            yield (
                f"it has {task.vocab_size} symbols, the tokenizer {tokenizer.name!r} "
                f"has room for {room}; lower its dials, or use "
                f"--config.data.tokenizer=symbols:{task.vocab_size}"
            )
    elif tokenizer.name.startswith("symbols"):
        yield (
            f"it is text, which the tokenizer {tokenizer.name!r} cannot spell; use "
            "--config.data.tokenizer=bytes"
        )


def task_dials() -> dict[str, dict[str, type]]:
    """The dials of every task, with their types."""
    return {name: _dials(kind) for name, (kind, _) in TASKS.items()}


def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _dials(kind: type) -> dict[str, type]:
    return {name: of for name, of in _fields(kind).items() if name != "text"}


def _value(where: str, dial: str, value: str, kind: type) -> Any:
    if kind is str:
        return value
    scale = _SUFFIXES.get(value[-1:].upper(), 1)
    digits = value[:-1] if scale > 1 else value
    try:
        number = float(digits) * scale
    except ValueError:
        number = None
    if number is None or (kind is int and number != int(number)):
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(
            f"{where}={value!r} is not {wanted}; lists have slashes, as in {dial}=1/2"
        )
    return kind(number)


def nearest(name: str, known: list[str]) -> str:
    """A hint: the name of `known` that `name` may mean, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
