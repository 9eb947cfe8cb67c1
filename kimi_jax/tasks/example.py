"""An instance of a task: what is read, what is asked, and which answers there are.

A position reads one token and may be asked for one label. Where answers are text to be
written, the label is the next token, so that a model whose likeliest tokens equal all
labels, given the true ones before, also writes exactly these by greedy generation: both
are right up to the same first mistake. Where they are not (`state.Permutations`), a
label belongs to its position alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

Family = Literal["recall", "state", "retrieval", "long horizon"]
STREAMS = ("training", "validation", "evaluation")
Stream = Literal["training", "validation", "evaluation"]


class Example(NamedTuple):
    """[T] int32 arrays. An answer is right if all labels that belong to it are."""

    tokens_T: np.ndarray  # inputs
    labels_T: np.ndarray  # what is asked; 0 where nothing is
    answers_T: np.ndarray  # number of the answer that a label belongs to; -1: none

    @property
    def asked_T(self) -> np.ndarray:
        return self.answers_T >= 0


class Task(Protocol):
    """One generator with its dials set."""

    family: ClassVar[Family]
    length: int  # most inputs of an instance

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the dials, each as "dial=value: why; fix"."""

    def example(self, rng: np.random.Generator) -> Example: ...


def draw(task: Task, seed: int, stream: Stream, index: int) -> Example:
    """Instance `index` of a stream: a function of its arguments alone.

    Streams share no instance but by chance.
    """
    rng = np.random.default_rng((seed, STREAMS.index(stream), index))
    return task.example(rng)


def digest(examples: Iterable[Example]) -> str:
    """Equal for equal instances: 16 hex digits of sha256 over all their arrays."""
    found = hashlib.sha256()
    for example in examples:
        for array in example:
            found.update(f"{len(array)}\n".encode() + array.astype("<i4").tobytes())
    return found.hexdigest()[:16]


def written(pieces: Sequence[tuple[np.ndarray | Sequence[int], int]]) -> Example:
    """An instance whose labels are its next tokens.

    Args:
      pieces: (ids, number of the answer that they are, or -1), in reading order.
    """
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in pieces])
    answers = np.repeat(
        np.array([answer for _, answer in pieces], np.int32),
        [len(ids) for ids, _ in pieces],
    )
    labels_T, answers_T = ids[1:], answers[1:]
    return Example(ids[:-1], np.where(answers_T >= 0, labels_T, 0), answers_T)
