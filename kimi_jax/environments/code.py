"""A change across the files of a small code base until its tests pass.

    system     list, read FILE, edit FILE LINE TEXT, run, submit
    user       rename fo to ba
    assistant  run                         tool c 3: no fo
    assistant  read c                      tool 1 use a (and so on, a line each)
    assistant  edit c 3 ret ba(x) + 2      tool ok
    assistant  run                         tool pass
    assistant  submit

The code is of the language of `interpreter`; `run` tells what the first test that fails
says. `submit` ends the episode: it is solved if those tests pass and others, which
nobody sees, as well. `difficulty` is the number of lines to change, each in a file of
its own. kind=rename: a function has another name from now on. kind=repair: the comment
above a function is right and its code may be wrong; one test covers all files. Filler
lengthens files by comments.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from kimi_jax.environments.dialogue import Dialogue, Reply, filler, pick, small_number
from kimi_jax.environments.environment import Task
from kimi_jax.environments.format import BadTurn
from kimi_jax.environments.interpreter import Fault, Program

KINDS = ("rename", "repair")
_NAMES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_LONGEST_LINE = 200
_NUMBERING = 8  # tokens that numbers and marks add to a comment that is read


class Test(NamedTuple):
    """What a function gives for a number."""

    file: str
    function: str
    argument: int
    wanted: int


@dataclasses.dataclass
class Code(Dialogue):
    """See the module.

    Attributes:
      kind: "rename" or "repair".
      distractors: files besides that need no change.
    """

    hardest: ClassVar[int] = 20
    kind: str = "rename"
    distractors: int = 1

    def problems(self, task: Task) -> Iterator[str]:
        yield from super().problems(task)
        if self.kind not in KINDS:
            yield f"kind={self.kind!r}: must be one of {', '.join(KINDS)}"
        if not 0 <= self.distractors <= 4:
            yield f"distractors={self.distractors}: must be from 0 to 4"

    def start(
        self, task: Task, rng: np.random.Generator, padding: int
    ) -> tuple[str, str]:
        write = self._rename if self.kind == "rename" else self._repair
        request, right, wrong = write(rng, task.difficulty)
        for other in range(self.distractors):
            name, number = self._names[-1 - other], int(rng.integers(2, 10))
            lines = [f"fn {name} x", f"ret x + {number}", "end"]
            right[self._letters[-1 - other]] = list(lines)
            wrong[self._letters[-1 - other]] = list(lines)
        self._make_tests(rng, right)
        self._right = {name: right[name] for name in sorted(right)}
        self._files = {name: wrong[name] for name in sorted(wrong)}
        self._changes = self._differing()
        self._pad(rng, padding)
        self._listed, self._seen = False, set[str]()
        self._ran: str | None = None  # what `run` said of the files as they are
        self._blamed = ""  # the file that it named
        return "list, read FILE, edit FILE LINE TEXT, run, submit", request

    def act(self, text: str) -> Reply:
        match text.split(" ", 3):
            case ["list"]:
                self._listed = True
                return Reply(" ".join(self._files))
            case ["read", file] if file in self._files:
                self._seen.add(file)
                lines = enumerate(self._files[file], start=1)
                return Reply("\n".join(f"{number} {line}" for number, line in lines))
            case ["edit", file, line, *rest] if file in self._files:
                return Reply(self._edit(file, line, rest[0] if rest else ""))
            case ["run"]:
                self._ran, self._blamed = self._failing(self._tests) or ("pass", "")
                return Reply(self._ran)
            case ["submit"]:
                solved = not self._failing(self._tests + self._hidden)
                return Reply("", True, float(solved))
            case ["read" | "edit", *_]:
                raise BadTurn("error: no such file")
        raise BadTurn("error: list, read FILE, edit FILE LINE TEXT, run or submit")

    def script(self) -> str:
        differing = self._differing()
        if not differing:
            return "submit" if self._ran == "pass" else "run"
        found = self.kind == "repair" or self._ran is not None
        if not found:
            return "run"
        if self.kind == "repair" and not self._listed:
            return "list"
        blamed = [(file, line) for file, line in differing if file == self._blamed]
        file, line = (blamed or differing)[0]
        if self.kind == "repair" and not blamed:
            unread = [name for name in self._files if name not in self._seen]
            if unread and unread[0] <= file:
                return f"read {unread[0]}"
        if file not in self._seen:
            return f"read {file}"
        return f"edit {file} {line + 1} {self._right[file][line]}"

    def slip(self, rng: np.random.Generator, closing: bool) -> str:
        """Writes a line wrong; closing: hands in what is not right."""
        file, line = self._changes[int(rng.integers(len(self._changes)))]
        if closing and self._failing(self._tests):
            return "submit"
        if not closing and rng.random() < 0.3:
            return f"read {file}"
        text = self._right[file][line]
        more = " y" if text.startswith("fn") else " + 1"
        return f"edit {file} {line + 1} {text}{more}"

    def progress(self) -> float:
        done = [
            self._files[file][line] == self._right[file][line]
            for file, line in self._changes
        ]
        return sum(done) / len(done)

    def _differing(self) -> list[tuple[str, int]]:
        """Lines that are not as they should be, in the order of the tests."""
        return [
            (name, line)
            for name in self._order
            for line, text in enumerate(self._right[name])
            if self._files[name][line] != text
        ]

    def _edit(self, file: str, line: str, text: str) -> str:
        number, lines = small_number(line), self._files[file]
        if number is None or not 1 <= number <= len(lines):
            raise BadTurn(f"error: lines are 1 to {len(lines)}")
        if len(text) > _LONGEST_LINE or "\n" in text:
            raise BadTurn(f"error: one line of at most {_LONGEST_LINE} characters")
        lines[number - 1] = text
        self._ran, self._blamed = None, ""
        return "ok"

    def _failing(self, tests: list[Test]) -> tuple[str, str] | None:
        """What the first test that fails says, and the file that it names, if any."""
        try:
            program = Program(self._files)
            for test in tests:
                got = program.call(test.file, test.function, [test.argument])
                if got != test.wanted:
                    said = f"{test.function} {test.argument} is {got}"
                    return f"{said} not {test.wanted}", ""
        except Fault as fault:
            return str(fault), fault.file
        return None

    def _draw_names(self, rng: np.random.Generator, files: int) -> None:
        """Names of functions and letters of files; distractors take the last."""
        self._names = pick(rng, _NAMES, files + 3 + self.distractors)
        self._letters = pick(rng, string.ascii_lowercase, files + self.distractors)

    def _rename(
        self, rng: np.random.Generator, changes: int
    ) -> tuple[str, dict[str, list[str]], dict[str, list[str]]]:
        """A function in one file, callers in others; all but one change are calls."""
        callers = max(1, changes - 1)
        self._draw_names(rng, 1 + callers)
        old, new, *names = self._names
        home, *files = self._letters[: 1 + callers]
        number = int(rng.integers(2, 10))
        right = {home: [f"fn {new} x", f"ret x * {number}", "end"]}
        self._covered = [(home, new)]
        for file, name in zip(files, names, strict=False):
            number = int(rng.integers(2, 10))
            right[file] = [
                f"use {home}",
                f"fn {name} x",
                f"ret {new}(x) + {number}",
                "end",
            ]
            self._covered.append((file, name))
        called = rf"\b{new}\b"
        wrong = {
            file: [
                line if file == home and changes == 1 else re.sub(called, old, line)
                for line in lines
            ]
            for file, lines in right.items()
        }
        self._order = [home, *files, *self._letters[1 + callers :]]
        return f"rename {old} to {new}", right, wrong

    def _repair(
        self, rng: np.random.Generator, changes: int
    ) -> tuple[str, dict[str, list[str]], dict[str, list[str]]]:
        """A chain of functions, one a file, of which all but one are wrong."""
        self._draw_names(rng, changes + 1)
        spared = int(rng.integers(changes + 1))
        # Faults all give more, or all less, so that none makes up for another.
        less = bool(rng.random() < 0.5)
        right: dict[str, list[str]] = {}
        wrong: dict[str, list[str]] = {}
        for i, (file, name) in enumerate(
            zip(self._letters[: changes + 1], self._names, strict=False)
        ):
            operator = "*" if i == 0 else str(rng.choice(["+", "-"]))
            low, high = sorted(rng.choice(np.arange(2, 10), 2, False).tolist())
            number, other = (low, high) if (operator == "-") == less else (high, low)
            below = "x" if i == 0 else self._names[i - 1]
            given = "x" if i == 0 else f"{below}(x)"
            use = [f"use {self._letters[i - 1]}"] if i else []
            head = [*use, f"# {name} is {below} {operator} {number}", f"fn {name} x"]
            right[file] = [*head, f"ret {given} {operator} {number}", "end"]
            written = number if i == spared else other
            wrong[file] = [*head, f"ret {given} {operator} {written}", "end"]
        self._covered = [(self._letters[changes], self._names[changes])]
        self._order = sorted(self._letters)
        return "make the code do what comments say", right, wrong

    def _make_tests(
        self, rng: np.random.Generator, right: dict[str, list[str]]
    ) -> None:
        program = Program(right)
        made = []
        for argument in rng.choice(np.arange(1, 20), 3, False).tolist():
            for file, function in self._covered:
                wanted = program.call(file, function, [argument])
                made.append(Test(file, function, argument, wanted))
        self._tests = made[: len(self._covered)]
        self._hidden = made[len(self._covered) :]

    def _pad(self, rng: np.random.Generator, padding: int) -> None:
        """Comments before and after the code of every file."""
        changed = {file for file, _ in self._changes}
        files = [*self._files]
        reads = len(changed)
        if self.kind == "repair":
            reads = 1 + max(files.index(file) for file in changed)
        for file in files:
            parts = filler(self.format, rng, padding // reads, _NUMBERING)
            comments = [f"# {part.rstrip()}" for part in parts]
            at = int(rng.integers(len(comments) + 1))
            for code in (self._right, self._files):
                code[file] = [*comments[:at], *code[file], *comments[at:]]
        self._changes = self._differing()
