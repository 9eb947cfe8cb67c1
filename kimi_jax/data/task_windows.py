"""Windows of generated tasks: one instance a row, loss on the answers alone.

MQAR, T = 7     key 3, value 9; key 5, value 8; asked for 5, then for 3
tokens          3 9 5 8 5 8 3
targets         0 0 0 0 8 0 9
weights         0 0 0 0 1 0 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np

from kimi_jax.data.media import Room
from kimi_jax.data.windows import Batch, padding_batch, share_of
from kimi_jax.errors import UserError
from kimi_jax.tasks import specs
from kimi_jax.tasks.example import Example, Stream, Task, draw
from kimi_jax.tasks.text import Text

PREFIX = "task:"


def is_task(source: str) -> bool:
    return source.startswith(PREFIX)


def make_tasks(
    sources: Sequence[str], text: Text, seq_len: int
) -> dict[str, specs.Task]:
    """The tasks of "task:SPEC" sources, by spec; `length` is `seq_len` if not given.

    Raises:
      UserError: a spec is wrong or stands for several tasks, or is longer than a row.
    """
    made = {}
    for source in sources:
        found = specs.parse(source.removeprefix(PREFIX))
        if len(found) > 1:
            listed = ", ".join(f"'{PREFIX}{spec}'" for spec in found)
            raise UserError(
                f"config.data.sources: {source!r} is {len(found)} tasks; name each: "
                f"{listed}"
            )
        task = specs.make(found[0], text, length=seq_len)
        if task.length > seq_len:
            raise UserError(
                f"config.data.sources: {source!r} has length={task.length}, more than "
                f"a row of config.train.seq_len={seq_len}; lower it or leave it out"
            )
        made[str(found[0])] = task
    return made


@dataclasses.dataclass(frozen=True)
class TaskWindows:
    """Instances as windows, see `windows.Windows`; instance i is of task i mod n."""

    tasks: tuple[Task, ...]
    length: int
    pad: int
    room: Room  # of batches for a model with images; tasks have none
    seed: int
    stream: Stream
    windows: ClassVar[int] = 1 << 40  # as good as no end, and any product fits 63 bits

    def write(self, batch: Batch, row_B: np.ndarray, index_B: np.ndarray) -> None:
        for row, index in zip(row_B.tolist(), index_B.tolist(), strict=True):
            number, which = divmod(index, len(self.tasks))
            write_row(
                batch, row, draw(self.tasks[which], self.seed, self.stream, number)
            )

    def at(self, length: int) -> TaskWindows:
        """The same tasks, longer in proportion; instances are other ones."""
        tasks = tuple(
            cast(Task, dataclasses.replace(cast(Any, task), length=stretched))
            for task in self.tasks
            for stretched in [task.length * length // self.length]
        )
        room = self.room._replace(
            patches=self.room.patches * length // self.length,
            items=self.room.items * length // self.length,
        )
        return dataclasses.replace(self, tasks=tasks, length=length, room=room)


def write_row(batch: Batch, row: int, example: Example) -> None:
    """Puts an instance into a row of a padding batch; labels are its targets."""
    size = len(example.tokens_T)
    batch["tokens"][row, :size] = example.tokens_T
    batch["targets"][row, :size] = example.labels_T
    batch["segment_ids"][row, :size] = 1
    batch["weights"][row, :size] = example.asked_T


@dataclasses.dataclass(frozen=True)
class EvalTasks:
    """`max_batches` batches of instances, see `loader.EvalBatches`."""

    source: TaskWindows
    batch_size: int
    max_batches: int
    graded: ClassVar[bool] = True

    @property
    def length(self) -> int:
        return self.source.length

    def at(self, length: int, batch_size: int) -> EvalTasks:
        """Tasks of another length; as many instances, to a whole batch."""
        batches = -(-self.max_batches * self.batch_size // batch_size)
        return EvalTasks(self.source.at(length), batch_size, batches)

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
        if not 0 <= step < len(self):
            raise IndexError(f"batch {step} of {len(self)}; indices count from 0")
        mine = share_of(self.batch_size, reader, readers)
        batch = padding_batch(len(mine), self.length, self.source.pad, self.source.room)
        first = step * self.batch_size
        index_B = np.arange(first + mine.start, first + mine.stop)
        self.source.write(batch, np.arange(len(mine)), index_B)
        return batch
