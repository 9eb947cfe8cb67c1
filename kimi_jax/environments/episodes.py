"""Playing environments: behind a guard, by the expert, from recorded turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.environments.environment import Environment, Step, Task
from kimi_jax.environments.rewards import mistaken
from kimi_jax.errors import UserError


@dataclasses.dataclass
class Guarded:
    """An environment whose faults end the episode and harm nobody, see `guard`."""

    environment: Environment
    vocab_size: int | None
    max_tokens: int
    max_turns: int

    def reset(self, task: Task) -> list[int]:
        self._turns = 0
        self._fault = ""
        try:
            prompt = self._tokens(self.environment.reset(task))
            if prompt:
                return prompt
            self._fault = "reset gave no tokens"
        except Exception as error:
            self._fault = _words("reset", error)
        return [0]

    def step(self, tokens: Sequence[int]) -> Step:
        self._turns += 1
        if self._fault:
            return _failed(self._fault)
        try:
            step = self._checked(self.environment.step(list(tokens)))
        except Exception as error:
            self._fault = _words("step", error)
            return _failed(self._fault)
        if step.done:
            self._fault = "step after the end"
        elif self._turns >= self.max_turns:
            self._fault = f"no end after {self.max_turns} turns"
            return _failed(self._fault)
        return step

    def expert(self) -> list[int]:
        return self.environment.expert()

    def mistake(self, rng: np.random.Generator, closing: bool) -> list[int]:
        return mistaken(self.environment).mistake(rng, closing)

    def _checked(self, step: Step) -> Step:
        tokens, reward, done, info = step
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward}")
        found = [] if done else self._tokens(tokens)
        if not done and not found:
            raise ValueError("no tokens, and the episode is not over")
        info = dict(info)
        info["success"] = bool(info.get("success", False))
        return Step(found, reward, bool(done), info)

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        if len(tokens) > self.max_tokens:
            raise ValueError(f"{len(tokens)} tokens, more than {self.max_tokens}")
        ids_N = np.asarray(tokens)
        if ids_N.size and not np.issubdtype(ids_N.dtype, np.integer):
            raise TypeError(f"tokens of type {ids_N.dtype}")
        top = (1 << 31) if self.vocab_size is None else self.vocab_size
        wrong_N = ids_N[(ids_N < 0) | (ids_N >= top)]
        if wrong_N.size:
            raise ValueError(f"token {wrong_N[0]} is outside 0..{top - 1}")
        return [int(i) for i in ids_N.tolist()]


def guard(
    environment: Environment,
    *,
    vocab_size: int | None = None,
    max_tokens: int = 1 << 22,
    max_turns: int = 10_000,
) -> Guarded:
    """The environment behind a guard: `step` ends an episode at a fault.

    Exceptions, ids outside the vocabulary, more than `max_tokens` tokens at once,
    rewards that are no finite number, and episodes of more than `max_turns` turns
    become Step([], 0.0, True, {"error": what it was, "success": False}). Where `reset`
    fails the prompt is the token 0 alone, and the first step is that one. A call that
    never returns cannot be ended.
    """
    return Guarded(environment, vocab_size, max_tokens, max_turns)


def _failed(fault: str) -> Step:
    return Step([], 0.0, True, {"error": fault, "success": False})


def _words(where: str, error: Exception) -> str:
    return f"{where}: {type(error).__name__}: {error}"[:500]


class Episode(NamedTuple):
    """A whole trajectory, without probabilities.

    Attributes:
      policy_mask: bool [N], the tokens that the policy wrote.
      spans: of the policy's turns in `tokens`, ends exclusive.
      rewards: one a turn.
    """

    task: Task
    tokens: list[int]
    policy_mask: np.ndarray
    spans: list[tuple[int, int]]
    rewards: list[float]
    success: bool

    @property
    def turns(self) -> list[list[int]]:
        """What the policy wrote, turn by turn."""
        return [self.tokens[start:stop] for start, stop in self.spans]


def play(environment: Environment, task: Task, turns: Iterable[list[int]]) -> Episode:
    """The episode of a fresh `task` in which the policy writes `turns`, up to its end.

    A turn is taken from `turns` when it is the policy's; what an iterator over the
    environment's own expert writes therefore fits.
    """
    tokens = list(environment.reset(task))
    spans: list[tuple[int, int]] = []
    rewards: list[float] = []
    success = False
    for turn in turns:
        step = environment.step(turn)
        spans.append((len(tokens), len(tokens) + len(turn)))
        tokens += [*turn, *step.tokens]
        rewards.append(step.reward)
        if step.done:
            success = bool(step.info.get("success", False))
            break
    mask_N = np.zeros(len(tokens), bool)
    for start, stop in spans:
        mask_N[start:stop] = True
    return Episode(task, tokens, mask_N, spans, rewards, success)


def replay(
    environment: Environment, task: Task, turns: Sequence[Sequence[int]]
) -> list[Step]:
    """Puts a fresh environment where these turns lead; the steps of all of them."""
    environment.reset(task)
    return [environment.step(turn) for turn in turns]


def expert_episode(
    environment: Environment, task: Task, *, noise: float = 0.0, skill: float = 1.0
) -> Episode:
    """The expert's episode, or that of one who is less than perfect.

    Args:
      noise: chance that a turn is preceded by a wrong one, from which the expert
        recovers.
      skill: share of the episodes that are solved. In the others all turns from one
        drawn at random on are mistakes that close the episode.

    Raises:
      UserError: a share outside 0..1, or the environment knows no mistakes.
    """
    for name, value in (("noise", noise), ("skill", skill)):
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name}={value}: must be from 0 to 1")
    if noise or skill < 1.0:
        mistaken(environment)
    rng = np.random.default_rng((task.seed, task.difficulty, 1))
    careless_from = -1
    if rng.random() >= skill:
        right = play(environment, task, _expert(environment))
        careless_from = int(rng.integers(len(right.spans)))
    return play(environment, task, _turns(environment, rng, noise, careless_from))


def _expert(environment: Environment) -> Iterator[list[int]]:
    while True:
        yield list(environment.expert())


def _turns(
    environment: Environment,
    rng: np.random.Generator,
    noise: float,
    careless_from: int,
) -> Iterator[list[int]]:
    right = 0
    while True:
        if right == careless_from:
            yield list(mistaken(environment).mistake(rng, True))
            continue
        if noise and rng.random() < noise:
            yield list(mistaken(environment).mistake(rng, False))
        yield list(environment.expert())
        right += 1
