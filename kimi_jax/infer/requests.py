"""What is asked of a generator, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.infer.sampling import Sampling

MAX_STOPS = 8  # stop sequences of a request
MAX_STOP_TOKENS = 16  # of each


@dataclasses.dataclass(frozen=True)
class Ask:
    """How a sequence is to be continued.

    Raises:
      UserError: a value out of its range.
    """

    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop: tuple[tuple[int, ...], ...] = ()  # sequences of tokens, kept in the result
    seed: int = 0
    # Looked at after each call with all tokens drawn: True ends the sequence there. The
    # call may have drawn a few more than it takes.
    until: Callable[[list[int]], bool] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens}: ask for at least 1")
        if len(self.stop) > MAX_STOPS:
            raise UserError(
                f"{len(self.stop)} stop sequences; give at most {MAX_STOPS}"
            )
        for stop in self.stop:
            if not 1 <= len(stop) <= MAX_STOP_TOKENS:
                raise UserError(
                    f"stop sequence {stop} has {len(stop)} tokens; give 1 to "
                    f"{MAX_STOP_TOKENS}"
                )


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, at least one token, and how it is to be continued."""

    prompt: tuple[int, ...]
    ask: Ask


class Piece(NamedTuple):
    """Tokens that were just drawn."""

    number: int  # of the request, or of the sequence, in the list that was given
    tokens: list[int]
    logprobs: list[float]  # of the model itself, see `sampling.draw`
    finished: str | None  # "stop", "length", or None: more to come
    routes: np.ndarray | None  # when finished, if recorded: see `Completion`


class Completion(NamedTuple):
    """All that was drawn for one request."""

    tokens: list[int]
    logprobs: list[float]
    finished: str
    # Experts, int32 [n, L, A], of the n tokens that were read: the prompt and all that
    # was drawn but the last.
    routes: np.ndarray | None


def stop_arrays(asks: list[Ask | None]) -> np.ndarray:
    """stop_BSL of each row, right-aligned and filled with -1."""
    stop_BSL = np.full((len(asks), MAX_STOPS, MAX_STOP_TOKENS), -1, np.int32)
    for row, ask in enumerate(asks):
        for s, stop in enumerate(ask.stop if ask else ()):
            stop_BSL[row, s, MAX_STOP_TOKENS - len(stop) :] = stop
    return stop_BSL


def ends(tokens: list[int], ask: Ask) -> bool:
    """Whether the tokens that were drawn are all that was wanted, by their content."""
    if ask.until is not None and ask.until(tokens):
        return True
    return any(tokens[-len(stop) :] == list(stop) for stop in ask.stop)
