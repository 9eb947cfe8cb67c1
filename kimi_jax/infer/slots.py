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
    features_MD: Any = None  # of images
    seen: int = 0  # features that were read

    @property
    def unseen(self) -> int:
        return 0 if self.features_MD is None else len(self.features_MD) - self.seen

    @property
    def waiting(self) -> int:
        """How many tokens are pending."""
        return len(self.tokens) - self.read

    def pending(self, most: int) -> list[int]:
        """The first of them. A million may wait: all would be copied for each chunk."""
        return self.tokens[self.read : self.read + most]


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

    def open(
        self,
        tokens: Sequence[int],
        *,
        room: int = 0,
        features_MD: Any = None,
        slot: int | None = None,
    ) -> Live:
        """A new sequence. Its tokens are read when they are needed.

        Args:
          room: tokens that will come in addition, for which pages are taken now; for
            any more, pages are taken as they come.
          features_MD: what the k-th placeholder among the tokens shows, for every k.
            The last token is no placeholder.
          slot: where it is to lie; None: the first that has room.

        Raises:
          UserError: no tokens, unknown ones, or more than fit.
          CacheFull: no slot or no pages are left.
        """
        self.check(tokens, room)
        self.check_features(tokens, features_MD)
        slot = self._free_slot(len(tokens) + room) if slot is None else slot
        self._check_free(slot)
        self.pager.grow(slot, len(tokens) + room)
        self._change(program.clear_row, slot)
        ids = [int(t) for t in tokens]
        self._live[slot] = Live(slot, ids, features_MD=features_MD)
        return self._live[slot]

    def append(self, sequence: Live, tokens: Sequence[int]) -> None:
        """Add tokens from outside, such as what a tool answered.

        Raises:
          UserError: no tokens, unknown ones, or more than fit.
        """
        self._check_live(sequence)
        self.check(tokens, len(sequence.tokens))
        self.reserve(sequence, len(sequence.tokens) + len(tokens))
        sequence.tokens += [int(t) for t in tokens]

    def reserve(self, sequence: Live, tokens: int) -> None:
        """Take pages for so many tokens in all.

        Raises:
          CacheFull: there are not enough; nothing has changed.
        """
        if (copy := self.pager.grow(sequence.slot, tokens)) is not None:
            self._change(program.copy_page, *copy)

    def read(self, sequences: Sequence[Live]) -> None:
        """Read all pending tokens of the sequences but the last of each."""
        for sequence in sequences:
            self._check_live(sequence)
        while long := [s for s in sequences if s.waiting > 1]:
            self.read_chunk(long)

    def read_chunk(self, sequences: Sequence[Live]) -> None:
        """One call: a chunk of the first sequence of each part of the rows."""
        each = self.slots // self._parts
        row_S = np.zeros(self._parts, np.int32)
        tokens_ST = np.zeros((self._parts, self._chunk), np.int32)
        chosen: dict[int, tuple[Live, int]] = {}
        for sequence in sequences:
            part = sequence.slot // each
            count = min(sequence.waiting - 1, self._chunk)
            if part in chosen or count < 1:
                continue
            chosen[part] = sequence, count
            row_S[part] = sequence.slot % each
            tokens_ST[part, :count] = sequence.pending(count)
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
                self._features(chosen),
                routes=self.routes,
            )
        for part, (sequence, count) in chosen.items():
            sequence.seen += self._marks(sequence.pending(count))
            sequence.read += count
            if self.routes:
                sequence.routes.append(np.asarray(routes_STLA)[part, :count])

    def fork(self, sequence: Live, count: int) -> list[Live]:
        """`count` more sequences that go on from the same tokens.

        Each costs a copy of the states; pages are shared. A last page that is part full
        is copied once a fork goes on. On a mesh the slots have to lie with that of the
        sequence.

        Raises:
          CacheFull: too few slots are left; nothing has changed.
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
        for slot in free[:count]:
            self.pager.fork(sequence.slot, slot, sequence.read)
            self._change(program.copy_states, sequence.slot, slot)
            tokens, routes = list(sequence.tokens), list(sequence.routes)
            # All images have been seen: the last token shows none.
            made.append(Live(slot, tokens, sequence.read, routes))
            self._live[slot] = made[-1]
        return made

    def close(self, sequence: Live) -> None:
        """Free the slot, and the pages that no other sequence shares."""
        self._check_live(sequence)
        del self._live[sequence.slot]
        self.pager.release(sequence.slot)

    def save(self, sequence: Live, *, skip: int = 0) -> Snapshot:
        """The sequence on the host, exactly; it lives on here.

        What is pending stays pending, unless images are among it: that is read first.

        Args:
          skip: of its first pages, those that are left out; see `load`.
        """
        if sequence.unseen:
            self.read([sequence])
        pages = self._pages_of(sequence, 0, skip)
        with self.on_mesh():
            saved = program.save_row(self.cache, sequence.slot, pages)
        tokens, routes = list(sequence.tokens), list(sequence.routes)
        return Snapshot(tokens, sequence.read, routes, *jax.device_get(saved))

    def load(
        self,
        snapshot: Snapshot,
        *,
        room: int = 0,
        slot: int | None = None,
        prefix: tuple[Live, int] | None = None,
    ) -> Live:
        """A sequence that goes on from a snapshot.

        Args:
          room, slot: see `open`.
          prefix: a sequence, and how many of its first pages are shared: those that
            `save` has skipped. Its slot and `slot` lie together.

        Raises:
          UserError: it does not fit into this cache.
        """
        self.check(snapshot.tokens, room)
        total = len(snapshot.tokens) + room
        slot = self._free_slot(total) if slot is None else slot
        self._check_free(slot)
        skip = 0
        if prefix is not None:
            source, skip = prefix
            self.pager.fork(source.slot, slot, skip * self.pager.page_size)
        try:
            self.pager.grow(slot, total)
        except CacheFull:
            self.pager.release(slot)
            raise
        tokens, routes = list(snapshot.tokens), list(snapshot.routes)
        self._live[slot] = sequence = Live(slot, tokens, snapshot.read, routes)
        pages = self._pages_of(sequence, self._num_pages, skip)
        self._change(program.load_row, slot, pages, tuple(snapshot[3:]))
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
        self.check_length(len(tokens), more)

    def check_length(self, tokens: int, more: int) -> None:
        """Raises UserError unless so many tokens fit."""
        if tokens + more > self.length:
            raise UserError(
                f"{tokens} tokens and {more} more do not fit into {self.length}; "
                "shorten them, ask for fewer, or raise `length`"
            )

    def check_features(self, tokens: Sequence[int], features_MD: Any) -> None:
        """Raises UserError unless there is a feature for each placeholder."""
        if features_MD is None:
            return
        marks = self._marks(tokens)
        if marks != len(features_MD) or self._marks(tokens[-1:]):
            raise UserError(
                f"{marks} placeholders for {len(features_MD)} features of images; the "
                "tokens must have one for each, and end with another token"
            )

    def _marks(self, tokens: Sequence[int]) -> int:
        vision = self.model.vision
        return 0 if vision is None else list(tokens).count(vision.placeholder)

    def _features(self, chosen: dict[int, tuple[Live, int]]) -> np.ndarray | None:
        """What the placeholders of a chunk show, [S, chunk, D]; None: nothing."""
        if not any(sequence.unseen for sequence, _ in chosen.values()):
            return None
        shape = (self._parts, self._chunk, self.model.width)
        features_SMD = np.zeros(shape, jax.numpy.dtype(self.model.dtype))
        for part, (sequence, _) in chosen.items():
            if sequence.unseen:
                next_MD = sequence.features_MD[sequence.seen :][: self._chunk]
                features_SMD[part, : len(next_MD)] = next_MD
        return features_SMD

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

    def _pages_of(self, sequence: Live, filler: int, skip: int) -> np.ndarray:
        """The pages that hold what was read, and `filler` up to a power of two."""
        count = -(-sequence.read // self.pager.page_size) - skip
        pages = np.full(1 << max(count - 1, 0).bit_length(), filler, np.int32)
        for i in range(count):
            pages[i] = self.pager.where(sequence.slot, skip + i)
        return pages

    def _free_slot(self, tokens: int) -> int:
        """The first that has room, or that is free."""
        free = self.free_slots()
        if not free:
            raise CacheFull(
                f"all {self.slots} slots are taken; close a sequence, or raise `slots`"
            )
        return next((slot for slot in free if self.pager.room(slot, tokens)), free[0])

    def _check_free(self, slot: int) -> None:
        if slot not in self.free_slots():
            raise CacheFull(
                f"slot {slot} is taken, or not one of {self.slots}; name a free one"
            )

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
