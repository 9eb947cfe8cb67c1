"""Rows that are generated, tasks or episodes, as windows without end.

A row is a function of (seed, stream, number) alone. `task_windows` and
`episode_windows` say what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from kimi_jax.data.media import Room
from kimi_jax.data.windows import Batch, check_batch, padding_batch, share_of
from kimi_jax.tasks.example import Stream

PREFIXES = ("task:", "episodes:")


def is_generated(source: str) -> bool:
    return source.startswith(PREFIXES)


class Rows(Protocol):
    """What one source generates."""

    def fill(
        self, batch: Batch, row: int, seed: int, stream: Stream, number: int
    ) -> None:
        """Puts row `number` of a stream into a row of a padding batch."""

    def stretched(self, numerator: int, denominator: int) -> Rows:
        """The same, longer in proportion; what is drawn is something else."""


@dataclasses.dataclass(frozen=True)
class GeneratedWindows:
    """Windows, see `windows.Windows`; window i is of source i mod n."""

    sources: tuple[Rows, ...]
    length: int
    pad: int
    room: Room  # of batches for a model with images; nothing generated has any
    seed: int
    stream: Stream
    windows: ClassVar[int] = 1 << 40  # as good as no end, and any product fits 63 bits

    def write(self, batch: Batch, row_B: np.ndarray, index_B: np.ndarray) -> None:
        for row, index in zip(row_B.tolist(), index_B.tolist(), strict=True):
            number, which = divmod(index, len(self.sources))
            self.sources[which].fill(batch, row, self.seed, self.stream, number)

    def at(self, length: int) -> GeneratedWindows:
        """The same sources, longer in proportion; what is drawn is something else."""
        room = self.room._replace(
            patches=self.room.patches * length // self.length,
            items=self.room.items * length // self.length,
        )
        sources = tuple(rows.stretched(length, self.length) for rows in self.sources)
        return dataclasses.replace(self, sources=sources, length=length, room=room)


@dataclasses.dataclass(frozen=True)
class EvalGenerated:
    """`max_batches` batches of generated rows, see `loader.EvalBatches`."""

    source: GeneratedWindows
    batch_size: int
    max_batches: int
    graded: ClassVar[bool] = True

    @property
    def length(self) -> int:
        return self.source.length

    def at(self, length: int, batch_size: int) -> EvalGenerated:
        """Rows of another length; as many of them, to a whole batch."""
        batches = -(-self.max_batches * self.batch_size // batch_size)
        return EvalGenerated(self.source.at(length), batch_size, batches)

    def __len__(self) -> int:
        return self.max_batches

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, 1)

    def rows(self, step: int, reader: int, readers: int) -> Batch:
        """The rows of batch `step` that are `reader`'s, [batch_size / readers, T].

        Raises:
          IndexError: there is no such batch.
          ValueError: the rows cannot be dealt out evenly, or there is no such reader.
        """
        check_batch(step, len(self))
        mine = share_of(self.batch_size, reader, readers)
        batch = padding_batch(len(mine), self.length, self.source.pad, self.source.room)
        first = step * self.batch_size
        index_B = np.arange(first + mine.start, first + mine.stop)
        self.source.write(batch, np.arange(len(mine)), index_B)
        return batch


def write_piece(
    batch: Batch,
    row: int,
    at: int,
    segment: int,
    columns: Sequence[np.ndarray | Sequence[int]],
) -> None:
    """Puts inputs, targets and weights, of one length, into a row from `at` on."""
    tokens, targets, weights = columns
    span = slice(at, at + len(tokens))
    batch["tokens"][row, span] = tokens
    batch["targets"][row, span] = targets
    batch["weights"][row, span] = weights
    batch["segment_ids"][row, span] = segment
