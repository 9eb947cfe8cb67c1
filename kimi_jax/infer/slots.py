"""Live sequences in the slots of one cache.

A sequence is opened with tokens, read in chunks, given more tokens from outside,
forked, saved, loaded and closed; nothing is ever read twice. At least one of its tokens
is always pending, which is to say not read yet: the model's answer to it is the
distribution of the next token, so that every sequence can go on from where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from kimi_jax import config
from kimi_jax.errors import UserError
from kimi_jax.infer import program
from kimi_jax.infer.pages import CacheFull, Pager
from kimi_jax.modules.cache import init_cache, shards


@dataclasses.dataclass(eq=False)
class Live:
    """A sequence that holds a slot.

    Attributes:
      tokens: all of them, from the first.
      read: how many of them are in the cache; the rest are pending.
      routes: experts of the tokens that were read, [n, L, A] each; empty unless asked.
    """

    slot: int
    tokens: list[int]
    read: int = 0
    routes: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.read :]


class Snapshot(NamedTuple):
    """A sequence on the host; any cache of the same model and page size takes it."""

    tokens: list[int]
    read: int
    routes: list[np.ndarray]
    states: Any
    pages: Any  # a power of two of them


class Slots:
    """Sequences of one model, in a cache.

    Args:
      variables: {"params", "balance"}, on `mesh` if there is one. May be replaced
        between calls; what is in the cache was made by those before.
      slots: B, sequences that live at one time.
      length: most tokens of a sequence.
      mesh: any of the project's, whose rows divide `slots`; None: one device.
      page_size: tokens of a page.
      num_pages: in the pool; None: enough for all slots at full length.
      cache_dtype: of the pages; None: the model's.
      read_chunk: tokens that are read in one call.
      routes: record the experts of every token.

    Raises:
      UserError: sizes that do not fit.
    """

    def __init__(
        self,
        model: config.Model,
        variables: Any,
        *,
        slots: int = 8,
        length: int = 4096,
        mesh: Mesh | None = None,
        page_size: int = 64,
        num_pages: int | None = None,
        cache_dtype: str | None = None,
        read_chunk: int = 256,
        routes: bool = False,
    ):
        _check_sizes(
            slots=slots, length=length, page_size=page_size, read_chunk=read_chunk
        )
        if routes and "moe" not in config.ffn_kinds(model):
            raise UserError("routes=True, but the model has no experts; leave it out")
        self.model, self.variables = model, variables
        self.slots, self.length, self.routes = slots, length, routes
        self._mesh, self._chunk = mesh, read_chunk
        rows, ranks = shards(mesh)
        if num_pages is None:
            num_pages = slots * -(-length // (page_size * ranks)) * ranks
        try:
            self.cache = init_cache(
                model,
                slots,
                length,
                page_size=page_size,
                num_pages=num_pages,
                dtype=cache_dtype,
                mesh=mesh,
            )
        except ValueError as error:
            raise UserError(str(error).replace("batch=", "slots=")) from error
        columns = self.cache.table_BM.shape[1]
        self.pager = Pager(slots, columns, num_pages, page_size, (rows, ranks))
        self._num_pages, self._parts = num_pages, rows
        self._live: dict[int, Live] = {}

    def open(self, tokens: Sequence[int], *, room: int = 0) -> Live:
        """A new sequence. Its tokens are read when they are needed.

        Args:
          room: tokens that will come in addition, for which pages are taken now; for
            any more, pages are taken as they come.

        Raises:
          UserError: no tokens, unknown ones, or more than fit.
          CacheFull: no slot or no pages are left.
        """
        self.check(tokens, room)
        free = self.free_slots()
        able = [slot for slot in free if self.pager.room(slot, len(tokens) + room)]
        if not free:
            raise CacheFull(
                f"all {self.slots} slots are taken; close a sequence, or raise `slots`"
            )
        slot = able[0] if able else free[0]
        self.pager.grow(slot, len(tokens) + room)
        self._change(program.clear_row, slot)
        self._live[slot] = Live(slot, [int(t) for t in tokens])
        return self._live[slot]

    def append(self, sequence: Live, tokens: Sequence[int]) -> None:
        """Add tokens from outside, such as what a tool answered.

        Raises:
          UserError: no tokens, unknown ones, or more than fit.
        """
        self._check_live(sequence)
        self.check(tokens, len(sequence.tokens))
        self.pager.grow(sequence.slot, len(sequence.tokens) + len(tokens))
        sequence.tokens += [int(t) for t in tokens]

    def read(self, sequences: Sequence[Live]) -> None:
        """Read all pending tokens of the sequences but the last of each."""
        for sequence in sequences:
            self._check_live(sequence)
        while waiting := [s for s in sequences if len(s.pending) > 1]:
            self.read_chunk(waiting)

    def read_chunk(self, sequences: Sequence[Live]) -> None:
        """One call: a chunk of the first sequence of each part of the rows."""
        each = self.slots // self._parts
        row_S = np.zeros(self._parts, np.int32)
        tokens_ST = np.zeros((self._parts, self._chunk), np.int32)
        chosen: dict[int, tuple[Live, int]] = {}
        for sequence in sequences:
            part = sequence.slot // each
            count = min(len(sequence.pending) - 1, self._chunk)
            if part in chosen or count < 1:
                continue
            chosen[part] = sequence, count
            row_S[part] = sequence.slot % each
            tokens_ST[part, :count] = sequence.pending[:count]
        if not chosen:
            return
        count_S = np.zeros(self._parts, np.int32)
        for part, (_, count) in chosen.items():
            count_S[part] = count
        with self.on_mesh():
            self.cache, routes_STLA = program.read(
                self.model,
                self.variables,
                self.current_cache(),
                row_S,
                tokens_ST,
                count_S,
                routes=self.routes,
            )
        for part, (sequence, count) in chosen.items():
            sequence.read += count
            if self.routes:
                sequence.routes.append(np.asarray(routes_STLA)[part, :count])

    def fork(self, sequence: Live, count: int) -> list[Live]:
        """`count` more sequences that go on from the same tokens.

        Each costs a copy of the states and of at most one page; all other pages are
        shared. On a mesh the slots have to lie with that of the sequence.

        Raises:
          CacheFull: too few slots or pages are left; nothing has changed.
        """
        self.read([sequence])
        shard = self.pager.shard(sequence.slot)
        free = [s for s in self.free_slots() if self.pager.shard(s) == shard]
        if len(free) < count:
            raise CacheFull(
                f"{count} forks need as many slots, and {len(free)} are free where the "
                "sequence lies; close sequences, or raise `slots`"
            )
        made: list[Live] = []
        try:
            for slot in free[:count]:
                copy = self.pager.fork(sequence.slot, slot, sequence.read)
                tokens, routes = list(sequence.tokens), list(sequence.routes)
                made.append(Live(slot, tokens, sequence.read, routes))
                self._live[slot] = made[-1]
                self.pager.grow(slot, len(tokens))
                pages = copy or (0, self._num_pages)
                self._change(program.copy_row, sequence.slot, slot, *pages)
        except CacheFull:
            for one in made:
                self.close(one)
            raise
        return made

    def close(self, sequence: Live) -> None:
        """Free the slot, and the pages that no other sequence shares."""
        self._check_live(sequence)
        del self._live[sequence.slot]
        self.pager.release(sequence.slot)

    def save(self, sequence: Live) -> Snapshot:
        """The sequence on the host, exactly; it lives on here."""
        self._check_live(sequence)
        pages = self._pages_of(sequence, 0)
        with self.on_mesh():
            saved = program.save_row(self.cache, sequence.slot, pages)
        tokens, routes = list(sequence.tokens), list(sequence.routes)
        return Snapshot(tokens, sequence.read, routes, *jax.device_get(saved))

    def load(self, snapshot: Snapshot, *, room: int = 0) -> Live:
        """A sequence that goes on from a snapshot.

        Raises:
          UserError: it does not fit into this cache.
        """
        sequence = self.open(snapshot.tokens, room=room)
        sequence.read, sequence.routes = snapshot.read, list(snapshot.routes)
        pages = self._pages_of(sequence, self._num_pages)
        self._change(program.load_row, sequence.slot, pages, tuple(snapshot[3:]))
        return sequence

    def free_slots(self) -> list[int]:
        return [slot for slot in range(self.slots) if slot not in self._live]

    def check(self, tokens: Sequence[int], more: int = 0) -> None:
        """Raises UserError unless the tokens exist and fit, with `more` beside them."""
        if len(tokens) == 0:
            raise UserError("no tokens; a prompt begins with at least one, such as bos")
        wrong = [t for t in tokens if not 0 <= t < self.model.vocab_size]
        if wrong:
            raise UserError(
                f"token {wrong[0]} is not in the vocabulary of {self.model.vocab_size};"
                " use the tokenizer of the model"
            )
        if len(tokens) + more > self.length:
            raise UserError(
                f"{len(tokens)} tokens and {more} more do not fit into {self.length}; "
                "shorten them, ask for fewer, or raise `length`"
            )

    def current_cache(self) -> Any:
        """The cache, with what the host knows of its rows."""
        length_B = np.zeros(self.slots, np.int32)
        for slot, sequence in self._live.items():
            length_B[slot] = sequence.read
        table_BM = self.pager.table_BM.copy()
        return self.cache._replace(table_BM=table_BM, length_B=length_B)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else _set(self._mesh)

    def _change(self, change: Any, *arguments: Any) -> None:
        with self.on_mesh():
            self.cache = change(self.cache, *arguments)

    def _pages_of(self, sequence: Live, filler: int) -> np.ndarray:
        """The pages that hold what was read, and `filler` up to a power of two."""
        count = -(-sequence.read // self.pager.page_size)
        pages = np.full(1 << max(count - 1, 0).bit_length(), filler, np.int32)
        for column in range(count):
            pages[column] = self.pager.where(sequence.slot, column)
        return pages

    def _check_live(self, sequence: Live) -> None:
        if self._live.get(sequence.slot) is not sequence:
            raise UserError(
                f"the sequence of slot {sequence.slot} was closed; open it again"
            )


def _set(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(mesh)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size}: must be at least 1")
