"""What the families of environments share: turns as text, limits, length by padding.

A family says how an episode starts, what a turn does, what the expert would write and
what a careless policy would. This class makes tokens of it.

Length: the expert plays the bare episode first. If that takes less than 0.7 of
`task.length`, as much filler is spread over it as makes it nearly `task.length` tokens
long; otherwise it stays as it is.
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from kimi_jax.environments.environment import Step, Task
from kimi_jax.environments.format import BadTurn, Format
from kimi_jax.errors import UserError
from kimi_jax.tasks.text import Prose
from kimi_jax.tasks.words import PEOPLE

LONGEST = 1 << 22  # tokens of a task; four times the dial's far end
FULL = 0.7  # an episode of this share of its length gets no filler
_TRIES = 16  # instances that are tried before a length is called too short
_PROBES = 4  # seeds that must fit at the first try when an environment is made
_SHORT = 8  # tokens that no sentence is short enough for
_ENDLESS = 10_000  # turns of an expert


class Reply(NamedTuple):
    """What a turn leads to; `success` is the final reward, 0 to 1, if done."""

    text: str
    done: bool = False
    success: float = 0.0


@dataclasses.dataclass
class Dialogue(abc.ABC):
    """An environment of turns of text; see the module.

    Attributes:
      hardest: the largest difficulty.
      process: what all process rewards of a solved task sum to; 0: none.
      max_turns: turns after which an episode ends unsolved; 0: four for each turn of
        the expert and 8 more.
    """

    hardest: ClassVar[int]
    format: Format
    process: float = 0.0
    max_turns: int = 0
    _over: bool = dataclasses.field(default=True, init=False, repr=False)

    @abc.abstractmethod
    def start(
        self, task: Task, rng: np.random.Generator, padding: int
    ) -> tuple[str, str]:
        """A fresh instance: the texts of system and user.

        Args:
          rng: all of the instance but its filler is drawn from it, in the same way
            whatever `padding`.
          padding: tokens of filler that the expert should meet.
        """

    @abc.abstractmethod
    def act(self, text: str) -> Reply:
        """Takes a turn.

        Raises:
          BadTurn: it says nothing; its words are what the policy is told.
        """

    @abc.abstractmethod
    def script(self) -> str:
        """The expert's turn from here."""

    @abc.abstractmethod
    def slip(self, rng: np.random.Generator, closing: bool) -> str:
        """A careless turn from here, see `environment.Fallible`."""

    @abc.abstractmethod
    def progress(self) -> float:
        """The share of the task that is done, 0 to 1; process rewards follow it."""

    def problems(self, task: Task) -> Iterator[str]:
        """What is wrong with a task or the dials, each as "dial=value: why; fix"."""
        if not 1 <= task.difficulty <= self.hardest:
            yield f"difficulty={task.difficulty}: must be from 1 to {self.hardest}"
        if not 1 <= task.length <= LONGEST:
            yield f"length={task.length}: must be from 1 to {LONGEST}"
        if task.seed < 0:
            yield f"seed={task.seed}: must be 0 or more"
        if self.max_turns < 0:
            yield f"max_turns={self.max_turns}: must be 0 or more"
        if not 0.0 <= self.process < float("inf"):
            yield f"process={self.process}: must be a number of 0 or more"

    def check(self, difficulty: int, length: int) -> None:
        """Raises UserError if such tasks cannot be; without making their filler."""
        for seed in range(_PROBES):
            task = Task("", difficulty, length, seed)
            self._refuse(task)
            if (bare := self._measure(task, 0, 0)) > length:
                raise self._too_short(task, bare)

    def reset(self, task: Task) -> list[int]:
        self._refuse(task)
        for attempt in range(_TRIES):
            bare = self._measure(task, attempt, 0)
            if bare <= task.length:
                break
        else:
            raise self._too_short(task, bare)
        padding = 0 if bare >= FULL * task.length else task.length - bare
        while padding:
            beyond = self._measure(task, attempt, padding) - task.length
            if beyond <= 0:
                break
            padding = max(0, padding - beyond)
        prompt = self._begin(task, attempt, padding)
        self._turn, self._over = 0, False
        return prompt

    def step(self, tokens: Sequence[int]) -> Step:
        if self._over:
            raise RuntimeError("no episode is going on; reset the environment")
        self._turn += 1
        before = self.progress()
        said = None
        try:
            said = self.format.read(list(tokens))
            reply = self.act(said)
        except BadTurn as bad:
            reply = Reply(str(bad))
        reward = self.process * (self.progress() - before)
        info = {"turn": self._turn, "said": said}
        self._over = reply.done or self._turn >= self._limit
        if self._over:
            info |= {"success": reply.success == 1.0, "out_of_turns": not reply.done}
            return Step([], reward + reply.success, True, info)
        return Step(self._reply(reply), reward, False, info)

    def expert(self) -> list[int]:
        return self.format.close(self.script())

    def mistake(self, rng: np.random.Generator, closing: bool) -> list[int]:
        return self.format.close(self.slip(rng, closing))

    def _refuse(self, task: Task) -> None:
        if problems := list(self.problems(task)):
            raise UserError(f"environment {self.name}: {'; '.join(problems)}")

    def _too_short(self, task: Task, bare: int) -> UserError:
        return UserError(
            f"environment {self.name}: difficulty={task.difficulty} takes {bare} "
            f"tokens, more than length={task.length}; raise length to "
            f"{-(-bare * 5 // 4 // 32) * 32} or lower difficulty"
        )

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def _begin(self, task: Task, attempt: int, padding: int) -> list[int]:
        kind = zlib.crc32(self.name.encode())
        rng = np.random.default_rng((task.seed, task.difficulty, kind, attempt))
        system, user = self.start(task, rng, padding)
        form = self.format
        turns = form.render("system", system) + form.render("user", user)
        return [form.bos, *turns, *form.open("assistant")]

    def _reply(self, reply: Reply) -> list[int]:
        return self.format.render("tool", reply.text) + self.format.open("assistant")

    def _measure(self, task: Task, attempt: int, padding: int) -> int:
        """Tokens of the expert's episode; sets the limit of turns."""
        size = len(self._begin(task, attempt, padding))
        for turn in range(1, _ENDLESS):
            said = self.script()
            size += len(self.format.close(said))
            reply = self.act(said)
            if reply.done:
                self._limit = self.max_turns or 4 * turn + 8
                return size
            size += len(self._reply(reply))
        raise RuntimeError(f"{self.name}: the expert does not end; task {task}")


def filler(
    form: Format, rng: np.random.Generator, tokens: int, overhead: int = 0
) -> list[str]:
    """Sentences, then single words, of at most `tokens` tokens in all.

    Args:
      overhead: tokens that whoever shows one of them adds to it.
    """
    parts: list[str] = []
    for sentence in map(bytes.decode, Prose().read(rng) if tokens > _SHORT else ()):
        size = len(form.encode(sentence)) + overhead
        if size > tokens:
            break
        tokens -= size
        parts.append(sentence)
    for word in pick(rng, PEOPLE, len(PEOPLE)) if tokens > overhead + 1 else ():
        size = len(form.encode(word + " ")) + overhead
        if size <= tokens:
            tokens -= size
            parts.append(word + " ")
    return parts


def pick(rng: np.random.Generator, items: Sequence[str], count: int) -> list[str]:
    """`count` different items in random order."""
    chosen_N = rng.choice(len(items), count, replace=False)
    return [items[i] for i in chosen_N.tolist()]


def small_number(text: str) -> int | None:
    """A number of at most six digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None
