"""Which pages of the pool belong to which row: bookkeeping on the host.

Rows share the pages of a common prefix; a page returns to the pool with its last owner.
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
        """How many pages two rows share, counted from the first."""
        if self.shard(one) != self.shard(other):
            return 0
        count = min(self._columns_B[one], self._columns_B[other])
        same = self.table_BM[one, :count] == self.table_BM[other, :count]
        return int(np.append(same, False).argmin())

    def grow(self, slot: int, tokens: int) -> None:
        """Give the row pages for `tokens` tokens in all.

        Raises:
          CacheFull: there are not enough; nothing has changed.
        """
        columns = self._columns(tokens)
        if (lacking := self._lacking(slot, columns)) is not None:
            raise CacheFull(lacking)
        for column in range(int(self._columns_B[slot]), columns):
            self._take(slot, column)

    def fork(self, source: int, target: int, tokens: int) -> tuple[int, int] | None:
        """Give an empty row the first `tokens` tokens of another.

        Whole pages are shared. The last page, if it is only part full, is to be copied.

        Returns:
          (from, to) of that copy, counted over the pools of all devices; None: none.

        Raises:
          CacheFull: there is no page for the copy; nothing has changed.
        """
        whole = tokens // self.page_size
        shard = self.shard(source)
        if shard != self.shard(target):
            raise ValueError(f"rows {source} and {target} lie on different devices")
        partial = tokens % self.page_size > 0
        if partial and not self._free[shard][whole % self._ranks]:
            raise CacheFull(self._lacking(target, whole + 1) or "no page is left")
        for column in range(whole):
            page = self.table_BM[source, column]
            self.table_BM[target, column] = page
            self._owners[shard, column % self._ranks, page] += 1
        self._columns_B[target] = whole
        if not partial:
            return None
        self._take(target, whole)
        return self.where(source, whole), self.where(target, whole)

    def where(self, slot: int, column: int) -> int:
        """A page of a row, counted over the pools of all devices."""
        device = self.shard(slot) * self._ranks + column % self._ranks
        return device * self._owners.shape[2] + int(self.table_BM[slot, column])

    def release(self, slot: int) -> None:
        """Take all pages from the row."""
        shard = self.shard(slot)
        for column in range(int(self._columns_B[slot])):
            page, rank = int(self.table_BM[slot, column]), column % self._ranks
            self._owners[shard, rank, page] -= 1
            if self._owners[shard, rank, page] == 0:
                self._free[shard][rank].append(page)
        self._columns_B[slot] = 0

    def _columns(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self, slot: int, column: int) -> None:
        shard, rank = self.shard(slot), column % self._ranks
        page = self._free[shard][rank].pop()
        self._owners[shard, rank, page] = 1
        self.table_BM[slot, column] = page
        self._columns_B[slot] = column + 1

    def _lacking(self, slot: int, columns: int, have: int = 0) -> str | None:
        """Why the row cannot grow to so many pages; None: it can."""
        have, most = max(have, int(self._columns_B[slot])), self.table_BM.shape[1]
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
