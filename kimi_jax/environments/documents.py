"""Questions on generated documents whose facts are spread and revised.

    system     find TEXT, read PAGE, say ANSWER; the last line holds
    user       4 pages: k7 boss town       the town of the boss of k7
    assistant  find k7 boss                tool 1 3
    assistant  read 3                      tool p4 town 3k. k7 boss m2.
    assistant  find m2 town                tool 2
    assistant  read 2                      tool m2 town 5e.
    assistant  say 5e

A fact is a line "KEY RELATION VALUE."; of several for a key and a relation the last in
the document holds. `difficulty` counts the lines that matter: 1 is one fact, 2 one fact
that is revised, 3 a relation of two facts of which one is revised, 4 and more are two
facts with more and more revisions. With mode=prompt the prompt is the document itself
and there is only one thing to say. Filler lengthens every page; `find` looks at facts
alone, and tells the last eight pages.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.environments.dialogue import Dialogue, Reply, filler, pick, small_number
from kimi_jax.environments.environment import Task
from kimi_jax.environments.format import BadTurn

MOST = 100  # distractors
LARGEST = 1 << 26  # tokens of a document
MODES = ("tools", "prompt")
_RELATIONS = ("boss", "twin", "host", "aunt")
_TRAITS = ("town", "ship", "song", "food")
_SHOWN = 8  # pages that `find` tells, the last ones
_KEYS = [f"{a}{digit}" for a in string.ascii_lowercase for digit in range(10)]
_VALUES = [f"{digit}{a}" for a in string.ascii_lowercase for digit in range(10)]


@dataclasses.dataclass
class Documents(Dialogue):
    """See the module.

    Attributes:
      pages: of a document, at least; facts with many revisions need more.
      distractors: facts besides those that matter.
      mode: "tools": pages are found and read; "prompt": all of them are in the prompt.
    """

    hardest: ClassVar[int] = 100
    pages: int = 4
    distractors: int = 4
    mode: str = "tools"

    def problems(self, task: Task) -> Iterator[str]:
        yield from super().problems(task)
        if not 1 <= self.pages <= 999:
            yield f"pages={self.pages}: must be from 1 to 999"
        if self.pages * task.length > LARGEST:
            yield (
                f"pages={self.pages} of up to length={task.length} are more than "
                f"{LARGEST} tokens; lower one of them"
            )
        if not 0 <= self.distractors <= MOST:
            yield f"distractors={self.distractors}: must be from 0 to {MOST}"
        if self.mode not in MODES:
            yield f"mode={self.mode!r}: must be one of {', '.join(MODES)}"

    def start(
        self, task: Task, rng: np.random.Generator, padding: int
    ) -> tuple[str, str]:
        self._draw_facts(rng, task)
        self._place_lines(rng)
        self._seed = int(rng.integers(1 << 30))
        self._read: set[int] = set()
        self._found: set[str] = set()
        self._texts: dict[int, str] = {}
        if self.mode == "prompt":
            self._room = padding // self._count
            pages = "\n".join(self._page(page) for page in range(1, self._count + 1))
            return "say ANSWER; the last line holds", f"{pages}\n{self._question}"
        self._room = padding // len(set(self._last))
        tools = "find TEXT, read PAGE, say ANSWER; the last line holds"
        return tools, f"{self._count} pages: {self._question}"

    def act(self, text: str) -> Reply:
        verb, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if verb == "say" and rest:
            return Reply("", True, float(rest == self._told[-1][-1]))
        if self.mode == "prompt":
            raise BadTurn("error: say ANSWER")
        if verb == "find" and rest:
            self._found.add(rest)
            found = [
                str(page)
                for page, lines in enumerate(self._lines, start=1)
                if any(rest in line for line in lines)
            ]
            return Reply(" ".join(found[-_SHOWN:]) or "none")
        if verb == "read":
            number = small_number(rest)
            if number is None or not 1 <= number <= self._count:
                raise BadTurn(f"error: pages are 1 to {self._count}")
            self._read.add(number)
            return Reply(self._page(number))
        raise BadTurn("error: find TEXT, read PAGE or say ANSWER")

    def script(self) -> str:
        if self.mode == "tools":
            for fact, last in zip(self._facts, self._last, strict=True):
                if last not in self._read:
                    return f"read {last}" if fact in self._found else f"find {fact}"
        return f"say {self._told[-1][-1]}"

    def slip(self, rng: np.random.Generator, closing: bool) -> str:
        """Looks elsewhere; closing: says what no longer holds, or of another key."""
        if closing:
            wrong = self._told[-1][:-1] or [*self._decoys.values()] or ["nothing"]
            return f"say {wrong[int(rng.integers(len(wrong)))]}"
        if rng.random() < 0.5:
            return f"read {int(rng.integers(1, self._count + 1))}"
        return f"find {_KEYS[int(rng.integers(len(_KEYS)))]}"

    def progress(self) -> float:
        return sum(last in self._read for last in self._last) / len(self._last)

    def _draw_facts(self, rng: np.random.Generator, task: Task) -> None:
        """What is told of each fact that matters, first to last, and of others."""
        hops = min(2, (task.difficulty + 1) // 2)
        revised = rng.integers(hops, size=task.difficulty - hops)
        often = (np.bincount(revised, minlength=hops) + 1).tolist()
        keys = pick(rng, _KEYS, len(_KEYS))
        values = pick(rng, _VALUES, often[-1] + self.distractors)
        (relation,) = pick(rng, _RELATIONS, 1)
        trait, *others = pick(rng, _TRAITS, len(_TRAITS))
        self._question, self._told = f"{keys[0]} {trait}", [values[: often[-1]]]
        self._facts = [f"{keys[0]} {trait}"]
        if hops == 2:
            self._question = f"{keys[0]} {relation} {trait}"
            self._told.insert(0, keys[1 : 1 + often[0]])
            self._facts = [f"{keys[0]} {relation}", f"{keys[often[0]]} {trait}"]
        # Other keys, the ones that were revised first, and other traits of the right.
        right = self._facts[-1].split()[0]
        rest = [key for key in keys[1:] if key != right]
        self._decoys = {
            f"{right} {others[i // 2]}"
            if i in (1, 3, 5)
            else f"{rest[i]} {trait}": value
            for i, value in enumerate(values[often[-1] :])
        }

    def _place_lines(self, rng: np.random.Generator) -> None:
        """The lines of every page, and the page of the last line of each fact."""
        self._count = max(self.pages, *map(len, self._told))
        self._lines: list[list[str]] = [[] for _ in range(self._count)]
        self._last: list[int] = []
        for fact, values in zip(self._facts, self._told, strict=True):
            pages = rng.choice(self._count, len(values), replace=False)
            for page, value in zip(sorted(pages.tolist()), values, strict=True):
                self._lines[page].append(f"{fact} {value}.")
            self._last.append(int(pages.max()) + 1)
        for fact, value in self._decoys.items():
            self._lines[int(rng.integers(self._count))].append(f"{fact} {value}.")
        for lines in self._lines:
            rng.shuffle(lines)

    def _page(self, number: int) -> str:
        if number not in self._texts:
            rng = np.random.default_rng((self._seed, number))
            lines = self._lines[number - 1]
            parts = filler(self.format, rng, self._room)
            places = np.sort(rng.integers(len(parts) + 1, size=len(lines))).tolist()
            for place, line in reversed(list(zip(places, lines, strict=True))):
                parts.insert(place, line + " ")
            self._texts[number] = "".join(parts).rstrip()
        return self._texts[number]
