"""Look-ups that depend on earlier answers.

    system     live get, old ask.          which tool tells what holds, which what held
    user       k7 a c                      from k7 by field a, from there by field c
    assistant  get k7 a                    tool =m3
    assistant  get m3 c                    tool busy
    assistant  get m3 c                    tool =p9
    assistant  say p9

Tools have other names in every task. The old ones answer as readily as the live one,
always with something else. The live tool fails now and then, at most once at a place.
`difficulty` is the number of look-ups. Filler lengthens the prompt and every answer,
which then holds keys that are not the one asked for as well.
"""

from __future__ import annotations

import dataclasses
import string
import zlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kimi_jax.environments.dialogue import Dialogue, Reply, filler, pick
from kimi_jax.environments.environment import Task
from kimi_jax.environments.format import BadTurn

_NAMES = ("get", "ask", "see", "try", "dig", "tap", "pry", "buy", "fit", "log")
_SMALL = 200  # look-ups; keys of more are longer
_KEYS = [f"{a}{digit}" for a in string.ascii_lowercase for digit in range(10)]
_MANY_KEYS = [f"{a}{digit}" for a in string.ascii_lowercase for digit in range(100)]
_FIELDS = list(string.ascii_lowercase)
_MANY_FIELDS = [a + b for a in _FIELDS for b in _FIELDS]


@dataclasses.dataclass
class Tools(Dialogue):
    """See the module.

    Attributes:
      distractors: tools that tell what no longer holds.
      fails: chance that the live tool fails at a place, where it is asked first.
    """

    hardest: ClassVar[int] = 500
    distractors: int = 1
    fails: float = 0.2

    def problems(self, task: Task) -> Iterator[str]:
        yield from super().problems(task)
        if not 0 <= self.distractors < len(_NAMES):
            yield f"distractors={self.distractors}: must be from 0 to {len(_NAMES) - 1}"
        if not 0.0 <= self.fails <= 1.0:
            yield f"fails={self.fails}: must be from 0 to 1"

    def start(
        self, task: Task, rng: np.random.Generator, padding: int
    ) -> tuple[str, str]:
        hops = task.difficulty
        self._live, *self._old = pick(rng, _NAMES, 1 + self.distractors)
        self._pool = _KEYS if hops < _SMALL else _MANY_KEYS
        self._path = pick(rng, self._pool, hops + 1)
        self._fields = _FIELDS if hops <= len(_FIELDS) else _MANY_FIELDS
        self._asked = pick(rng, self._fields, hops)
        self._salt = int(rng.integers(1 << 30))
        self._busy = set(
            np.flatnonzero(rng.random(hops) < self.fails)[: (hops + 1) // 2].tolist()
        )
        self._known = 0
        self._last: str | None = None  # what the tool asked last has told
        self._strayed = False  # and whether that leads astray
        self._called = 0
        self._notes = list(self._make_notes(rng, padding, hops + 1))
        before, after = self._notes[0]
        old = f", old {' '.join(self._old)}" if self._old else ""
        system = f"{before}live {self._live}{old}.{after}"
        return system, " ".join([self._path[0], *self._asked])

    def act(self, text: str) -> Reply:
        match text.split():
            case ["say", answer]:
                return Reply("", True, float(answer == self._path[-1]))
            case [tool, key, field] if tool in (self._live, *self._old):
                return Reply(self._look_up(tool, key, field))
        raise BadTurn("error: TOOL KEY FIELD, or say KEY")

    def script(self) -> str:
        if self._known == len(self._asked):
            return f"say {self._path[-1]}"
        return f"{self._live} {self._path[self._known]} {self._asked[self._known]}"

    def slip(self, rng: np.random.Generator, closing: bool) -> str:
        """Asks an old tool or for another field; closing: stops early, or believes."""
        at = min(self._known, len(self._asked) - 1)
        key, field = self._path[at], self._asked[at]
        if closing and (self._strayed or not self._old or rng.random() < 0.5):
            last = self._last if self._last != self._path[-1] else None
            return f"say {last or key}"
        if closing or (self._old and rng.random() < 0.5):
            return f"{self._old[int(rng.integers(len(self._old)))]} {key} {field}"
        others = [name for name in self._fields if name != field]
        return f"{self._live} {key} {others[int(rng.integers(len(others)))]}"

    def progress(self) -> float:
        return self._known / len(self._asked)

    def _look_up(self, tool: str, key: str, field: str) -> str:
        if key not in self._pool:
            raise BadTurn("error: no such key")
        if field not in self._fields:
            raise BadTurn("error: no such field")
        place = self._place(key, field)
        if tool == self._live and place in self._busy:
            self._busy.discard(place)
            return "busy"
        self._last = self._told(tool, key, field)
        self._strayed = place is None or tool != self._live
        if not self._strayed and place == self._known:
            self._known += 1
        self._called += 1
        before, after = self._notes[1 + (self._called - 1) % len(self._asked)]
        return f"{before}={self._last}{after}"

    def _place(self, key: str, field: str) -> int | None:
        """The number of the look-up, if it is one of those asked for."""
        at = self._path.index(key) if key in self._path[:-1] else -1
        return at if at >= 0 and self._asked[at] == field else None

    def _told(self, tool: str, key: str, field: str) -> str:
        place = self._place(key, field)
        right = None if place is None else self._path[place + 1]
        if tool == self._live and right is not None:
            return right
        drawn = zlib.crc32(f"{self._salt} {tool} {key} {field}".encode())
        told = self._pool[drawn % len(self._pool)]
        return told if told != right else self._pool[(drawn + 1) % len(self._pool)]

    def _make_notes(
        self, rng: np.random.Generator, tokens: int, notes: int
    ) -> Iterator[tuple[str, str]]:
        """Filler before and after an answer; long ones tell keys that once were it."""
        for left in range(notes, 0, -1):
            room = tokens // left - 1  # for the space between
            parts = []
            once = f"It was {self._pool[int(rng.integers(len(self._pool)))]}. "
            size = len(self.format.encode(once))
            if room > 4 * size:
                parts, room = [once], room - size
            parts += filler(self.format, rng, room)
            parts = [parts[i] for i in rng.permutation(len(parts)).tolist()]
            at = int(rng.integers(len(parts) + 1))
            note = "".join(parts[:at]), " " * (at < len(parts)) + "".join(parts[at:])
            tokens -= sum(len(self.format.encode(text)) for text in note)
            yield note
