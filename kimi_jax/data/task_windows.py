"""Windows of generated tasks: one instance a row, loss on the answers alone.

MQAR, T = 7     key 3, value 9; key 5, value 8; asked for 5, then for 3
tokens          3 9 5 8 5 8 3
targets         0 0 0 0 8 0 9
weights         0 0 0 0 1 0 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from kimi_jax.data.generated import write_piece
from kimi_jax.data.windows import Batch
from kimi_jax.errors import UserError
from kimi_jax.tasks import specs
from kimi_jax.tasks.example import Stream, Task, draw
from kimi_jax.tasks.text import Text

PREFIX = "task:"


@dataclasses.dataclass(frozen=True)
class TaskRows:
    """Instances of a task, see `generated.Rows`; labels are targets."""

    task: Task

    def fill(
        self, batch: Batch, row: int, seed: int, stream: Stream, number: int
    ) -> None:
        example = draw(self.task, seed, stream, number)
        columns = example.tokens_T, example.labels_T, example.asked_T
        write_piece(batch, row, 0, 1, columns)

    def stretched(self, numerator: int, denominator: int) -> TaskRows:
        length = self.task.length * numerator // denominator
        changed = dataclasses.replace(cast(Any, self.task), length=length)
        return TaskRows(cast(Task, changed))


def make_tasks(sources: Sequence[str], text: Text, seq_len: int) -> dict[str, TaskRows]:
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
        refuse_longer(source, task.length, seq_len)
        made[str(found[0])] = TaskRows(task)
    return made


def refuse_longer(source: str, length: int, seq_len: int) -> None:
    """Raises UserError if what a source generates does not fit a row."""
    if length > seq_len:
        raise UserError(
            f"config.data.sources: {source!r} has length={length}, more than a row "
            f"of config.train.seq_len={seq_len}; lower it or leave it out"
        )
