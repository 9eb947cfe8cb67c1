"""Windows of packed text, by index.

A window is a row of T inputs made of pieces of documents (`packing` says which).
`segment_ids` tell the documents of a window apart; the model resets its state and masks
its attention by them.

    documents   <bos> a b <eod>, <bos> c <eod>        packing "split", T = 6
    tokens      <bos> a   b     <eod> <bos> c
    targets     a     b   <eod> <pad> c     <eod>
    segment_ids 1     1   1     1     2     2
    weights     1     1   1     0     1     1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kimi_jax.data.documents import Documents
from kimi_jax.data.media import NO_ROOM, MediaStore, Room
from kimi_jax.data.packing import PACKINGS, Pieces

Batch = dict[str, np.ndarray]


class Windows(Protocol):
    """Windows by index, of text or generated."""

    @property
    def length(self) -> int:
        """T."""

    @property
    def pad(self) -> int:
        """The token of positions without text."""

    @property
    def room(self) -> Room:
        """For images in each row."""

    @property
    def windows(self) -> int:
        """How many there are."""

    def write(self, batch: Batch, row_B: np.ndarray, index_B: np.ndarray) -> None:
        """Puts the windows `index_B` into the rows `row_B` of a padding batch."""


class Packed(NamedTuple):
    """Windows of one store."""

    tokens_N: np.ndarray
    pieces: Pieces
    media: MediaStore | None = None


def pack(
    documents: Documents, length: int, packing: str, room: Room = NO_ROOM
) -> Packed:
    """The windows of `documents`; packing is a key of `PACKINGS`.

    Documents with images are kept whole by any packing.
    """
    media = documents.media
    if media is not None:
        pieces = media.pack(documents, length, room)
        return Packed(documents.tokens_N, pieces, media)
    return Packed(documents.tokens_N, PACKINGS[packing](documents, length))


@dataclasses.dataclass(frozen=True)
class Pool:
    """Windows of any number of stores under one numbering, in the order given.

    Args:
      packed: packed for windows of `length`.
      length: T, inputs a window.
      pad: the token of positions without text.
      room: for images in each row.
    """

    packed: tuple[Packed, ...]
    length: int
    pad: int
    room: Room = NO_ROOM

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Number of windows up to and including each member of `packed`."""
        return np.cumsum([member.pieces.windows for member in self.packed], dtype=int)

    @property
    def windows(self) -> int:
        return int(self.ends[-1]) if self.packed else 0

    def read(self, index_B: Sequence[int] | np.ndarray, rows: int) -> Batch:
        """A batch of `rows` rows: the windows `index_B`, then padding."""
        batch = padding_batch(rows, self.length, self.pad, self.room)
        self.write(batch, np.arange(len(index_B)), np.asarray(index_B))
        return batch

    def write(self, batch: Batch, row_B: np.ndarray, index_B: np.ndarray) -> None:
        """Puts the windows `index_B` into the rows `row_B` of a padding batch.

        Raises:
          IndexError: there is no such window.
        """
        for row, index in zip(row_B.tolist(), index_B.tolist(), strict=True):
            if not 0 <= index < self.windows:
                raise IndexError(
                    f"window {index} of {self.windows}; indices count from 0"
                )
            member = int(np.searchsorted(self.ends, index, side="right"))
            packed = self.packed[member]
            first = int(self.ends[member]) - packed.pieces.windows
            _write_window(batch, row, packed, index - first)


def check_batch(step: int, batches: int) -> None:
    """Raises IndexError unless there is a batch `step` among so many."""
    if not 0 <= step < batches:
        raise IndexError(f"batch {step} of {batches}; indices count from 0")


def share_of(batch_size: int, reader: int, readers: int) -> range:
    """The rows of a batch that are those of reader `reader` of `readers`.

    Raises:
      ValueError: there is no such reader, or the rows cannot be dealt out evenly.
    """
    if not 0 <= reader < readers:
        raise ValueError(f"reader {reader} of {readers}; readers count from 0")
    if batch_size % readers:
        raise ValueError(
            f"batch_size={batch_size} rows cannot be dealt out to {readers} readers "
            f"evenly; set config.train.batch_size to a multiple of {readers}"
        )
    size = batch_size // readers
    return range(reader * size, (reader + 1) * size)


def padding_batch(rows: int, length: int, pad: int, room: Room = NO_ROOM) -> Batch:
    """Rows without text.

    Returns:
      tokens [rows, T] int32, the inputs; `pad` everywhere.
      targets [rows, T] int32, the token after each input; `pad` if there is none.
      segment_ids [rows, T] int32: documents counted from 1 within the row; 0: padding.
      weights [rows, T] float32: 1 where there is a target, else 0.
      And, with room for images, what `kimi_jax.modules.vision.Media` holds:
      patches [rows, P, C] float32 and grids [rows, I, 3] int32; zeros.
    """
    shape = rows, length
    pictures = {}
    if room.patches:
        pictures = {
            "patches": np.zeros((rows, room.patches, room.values), np.float32),
            "grids": np.zeros((rows, room.items, 3), np.int32),
        }
    return pictures | {
        "tokens": np.full(shape, pad, np.int32),
        "targets": np.full(shape, pad, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }


def _write_window(batch: Batch, row: int, packed: Packed, window: int) -> None:
    tokens_T, targets_T, segment_ids_T, weights_T = (
        batch[name][row] for name in ("tokens", "targets", "segment_ids", "weights")
    )
    pieces = packed.pieces
    mine = slice(*pieces.first_V[window : window + 2].tolist())
    columns = pieces.start_P[mine], pieces.inputs_P[mine], pieces.targets_P[mine]
    at = 0
    for segment, (start, inputs, targets) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True), start=1
    ):
        tokens_T[at : at + inputs] = packed.tokens_N[start : start + inputs]
        targets_T[at : at + targets] = packed.tokens_N[start + 1 : start + 1 + targets]
        segment_ids_T[at : at + inputs] = segment
        weights_T[at : at + targets] = 1
        at += inputs
    if packed.media is not None:
        packed.media.finish(batch, row, pieces.start_P[mine].tolist())
