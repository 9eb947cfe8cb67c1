"""Which pages of the pool belong to which row: bookkeeping on the host.

Rows share the pages of a common prefix; a page returns to the pool with its last owner.
A page that is part full is shared too, until a row that has it from another grows: then
that row gets a copy. The row that began the page goes on writing behind what is shared.
On a mesh every device has its own pages (see `kimi_jax.modules.cache`).
"""

from __future__ import annotations

import numpy as np

from kimi_jax.errors import UserError


class CacheFull(UserError):
    """There are no pages left for what was asked."""


class Pager:
    """Deals out pages.

    Args:
      slots: B, rows.
      columns: M, most pages of a row.
      num_pages: N, over all devices.
      page_size: P, tokens.
      parts: of the rows and of the pages of a row, see `cache.shards`.

    Attributes:
      table_BM: int32, for `Cache.table_BM`. Entries past the pages of a row mean
        nothing.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        num_pages: int,
        page_size: int,
        parts: tuple[int, int] = (1, 1),
    ):
        self.page_size = page_size
        self.table_BM = np.zeros((slots, columns), np.int32)
        self._columns_B = np.zeros(slots, np.int32)
        # Tokens of a prefix whose last page, part full, is another row's; 0: none is.
        self._borrowed_B = np.zeros(slots, np.int32)
        self._rows, self._ranks = parts
        each = num_pages // (self._rows * self._ranks)
        self._owners = np.zeros((self._rows, self._ranks, each), np.int32)
        self._free = [
            [list(range(each))[::-1] for _ in range(self._ranks)]
            for _ in range(self._rows)
        ]

    def shard(self, slot: int) -> int:
        """Which part of the rows the row lies in; only within one pages are shared."""
        return slot * self._rows // len(self.table_BM)

    def in_use(self) -> int:
        return int(np.count_nonzero(self._owners))

    def room(self, slot: int, tokens: int, *, shared: int = 0) -> bool:
        """Whether the row can grow to `tokens` tokens.

        Args:
          shared: tokens that an empty row will have of another by `fork`.
        """
        have = shared // self.page_size
        return self._lacking(slot, self._columns(tokens), have) is None

    def common(self, one: int, other: int) -> int:
        """How many whole pages two rows share, counted from the first."""
        if self.shard(one) != self.shard(other):
            return 0
        count = min(self._own_columns(one), self._own_columns(other))
        same = self.table_BM[one, :count] == self.table_BM[other, :count]
        return int(np.append(same, False).argmin())

    def grow(self, slot: int, tokens: int) -> tuple[int, int] | None:
        """Give the row pages for `tokens` tokens in all; to be called before it writes.

        Returns:
          (from, to) of a page that must be copied first, counted over the pools of all
          devices; None: none.

        Raises:
          CacheFull: there are not enough; nothing has changed.
        """
        columns = self._columns(tokens)
        if (lacking := self._lacking(slot, columns)) is not None:
            raise CacheFull(lacking)
        copy = self._buy(slot) if tokens > self._borrowed_B[slot] > 0 else None
        for column in range(int(self._columns_B[slot]), columns):
            self._take(slot, column)
        return copy

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Give an empty row the first `tokens` tokens of another: no page is taken."""
        if self.shard(source) != self.shard(target):
            raise ValueError(f"rows {source} and {target} lie on different devices")
        columns = self._columns(tokens)
        for column in range(columns):
            self.table_BM[target, column] = self.table_BM[source, column]
            self._owners[self._at(target, column)] += 1
        self._columns_B[target] = columns
        self._borrowed_B[target] = tokens if tokens % self.page_size else 0

    def where(self, slot: int, column: int) -> int:
        """A page of a row, counted over the pools of all devices."""
        device = self.shard(slot) * self._ranks + column % self._ranks
        return device * self._owners.shape[2] + int(self.table_BM[slot, column])

    def release(self, slot: int) -> None:
        """Take all pages from the row."""
        for column in range(int(self._columns_B[slot])):
            shard, rank, page = at = self._at(slot, column)
            self._owners[at] -= 1
            if self._owners[at] == 0:
                self._free[shard][rank].append(page)
        self._columns_B[slot] = self._borrowed_B[slot] = 0

    def _columns(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _own_columns(self, slot: int) -> int:
        """Its pages, without one that it cannot write to because others have it."""
        columns = int(self._columns_B[slot])
        if self._borrowed_B[slot] and self._owners[self._at(slot, columns - 1)] > 1:
            return columns - 1
        return columns

    def _buy(self, slot: int) -> tuple[int, int] | None:
        """Make the page that was borrowed the row's own; returns the copy to make."""
        column = int(self._columns_B[slot]) - 1
        needs_copy = self._own_columns(slot) == column
        self._borrowed_B[slot] = 0
        if not needs_copy:
            return None  # the others have left
        before = self.where(slot, column)
        self._owners[self._at(slot, column)] -= 1
        self._take(slot, column)
        return before, self.where(slot, column)

    def _at(self, slot: int, column: int) -> tuple[int, int, int]:
        """The page of a row, as an index of `_owners`."""
        page = int(self.table_BM[slot, column])
        return self.shard(slot), column % self._ranks, page

    def _take(self, slot: int, column: int) -> None:
        shard, rank = self.shard(slot), column % self._ranks
        page = self._free[shard][rank].pop()
        self._owners[shard, rank, page] = 1
        self.table_BM[slot, column] = page
        self._columns_B[slot] = column + 1

    def _lacking(self, slot: int, columns: int, have: int = 0) -> str | None:
        """Why the row cannot grow to so many pages; None: it can."""
        have, most = max(have, self._own_columns(slot)), self.table_BM.shape[1]
        if columns > most:
            return (
                f"{columns * self.page_size} tokens do not fit into a row of "
                f"{most * self.page_size}; raise `length`"
            )
        free = self._free[self.shard(slot)]
        needed = [0] * self._ranks
        for column in range(have, columns):
            needed[column % self._ranks] += 1
        if all(need <= len(own) for need, own in zip(needed, free, strict=True)):
            return None
        return (
            f"the cache has {sum(map(len, free))} pages of {self.page_size} tokens "
            f"left and this needs {sum(needed)} more; close sequences, or raise "
            "`num_pages`"
        )
