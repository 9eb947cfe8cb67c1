"""Documents with images and clips in them, next to the token stores of plain text.

In its text an item is one placeholder token, which becomes one position for each merged
patch (`expand`). The positions take the features of the image as their input and are
never predicted: only text is learned from.

A `MediaStore` is held in memory but for the pixels, which are read as batches are made.
Its documents are never cut: they go whole, one after the other, into windows with room
for their tokens, patches and items.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kimi_jax.config import Vision
from kimi_jax.data import images
from kimi_jax.data.packing import Pieces
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError

if TYPE_CHECKING:
    from kimi_jax.data.documents import Documents

MARK = "<image>"  # where an item stands in the text of a document


class Item(NamedTuple):
    """An image or clip: its size, and its pixels when they are wanted."""

    name: str  # for people, as the name of its file
    height: int
    width: int
    frames: int
    read: Callable[[], np.ndarray]  # RGB bytes [frames, height, width, 3]


class Example(NamedTuple):
    """Text with a MARK for each item."""

    name: str  # for people, as "pairs.jsonl, line 3"
    text: str
    items: tuple[Item, ...]


class Room(NamedTuple):
    """What one row of a batch holds beside its tokens."""

    patches: int
    items: int
    values: int  # numbers a patch


NO_ROOM = Room(0, 0, 0)


def expand(
    tokens_N: np.ndarray, grids_I3: np.ndarray, placeholder: int, merge: int
) -> np.ndarray:
    """`tokens_N` with each placeholder repeated for every merged patch of its item.

    Args:
      tokens_N: ids with one placeholder for each item, in order.
      grids_I3: (t, h, w) of each item in patches.

    Raises:
      UserError: there are more or fewer placeholders than items.
    """
    grids_I3 = np.asarray(grids_I3, np.int64).reshape(-1, 3)
    here_N = np.asarray(tokens_N) == placeholder
    if here_N.sum() != len(grids_I3):
        raise UserError(
            f"the text has {here_N.sum()} placeholders (token {placeholder}) for "
            f"{len(grids_I3)} images; write one for each image, where it belongs"
        )
    repeats_N = np.ones(len(here_N), np.int64)
    repeats_N[here_N] = merged_patches(grids_I3, merge)
    return np.repeat(tokens_N, repeats_N)


def merged_patches(grids_I3: np.ndarray, merge: int) -> np.ndarray:
    """Positions that each item takes: int64 [I]."""
    return grids_I3[:, 1] * grids_I3[:, 2] // merge**2


@dataclasses.dataclass(frozen=True, eq=False)
class MediaStore:
    """A token store whose documents show items; `make_store` makes it.

    Attributes:
      tokens_N, offsets_M, documents, digest, title: as of any token store.
      items_D: the items of each document.
      fits_D: the size in patches of each of them.
      vision: of the model that they are cut for.
    """

    tokens_N: np.ndarray
    offsets_M: np.ndarray
    digest: str
    title: str
    items_D: tuple[tuple[Item, ...], ...]
    fits_D: tuple[tuple[images.Fit, ...], ...]
    vision: Vision

    @property
    def documents(self) -> int:
        return len(self.items_D)

    @functools.cached_property
    def needs_D2(self) -> np.ndarray:
        """Patches and items of each document, int64 [D, 2]."""
        return np.array(
            [
                (
                    sum(i.frames * f.patches for i, f in zip(items, fits, strict=True)),
                    len(items),
                )
                for items, fits in zip(self.items_D, self.fits_D, strict=True)
            ],
            np.int64,
        ).reshape(-1, 2)

    def pack(self, documents: Documents, length: int, room: Room) -> Pieces:
        """Windows of whole documents, each where the one before it left room.

        Raises:
          UserError: a document is larger than a window.
        """
        index_D = self._index(documents.start_D)
        needs_D3 = np.column_stack([documents.sizes_D - 1, self.needs_D2[index_D]])
        limits = np.array([length, room.patches, room.items])
        self._check(needs_D3, limits)
        first, filled = [0], np.zeros(3, np.int64)
        for d, needs in enumerate(needs_D3):
            if np.any(filled + needs > limits):
                first.append(d)
                filled = np.zeros(3, np.int64)
            filled = filled + needs
        inputs_D = needs_D3[:, 0].astype(np.int32)
        bounds = np.array([*first, len(inputs_D)] if len(inputs_D) else [0], np.int64)
        return Pieces(documents.start_D, inputs_D, inputs_D, bounds)

    def _check(self, needs_D3: np.ndarray, limits: np.ndarray) -> None:
        names = ("seq_len", "row_patches", "row_items")
        for most, limit, name in zip(
            needs_D3.max(axis=0, initial=0), limits, names, strict=True
        ):
            if most > limit:
                raise UserError(
                    f"{self.title}: a document needs config.train.{name}={most}, which "
                    f"is {limit}; raise it to {most} or split the document"
                )

    def finish(self, batch: dict[str, np.ndarray], row: int, starts: list[int]) -> None:
        """Puts the items of documents into a row that has their tokens already.

        Args:
          starts: where the documents begin in the store.
        """
        image_T = batch["targets"][row] == self.vision.placeholder
        batch["weights"][row, image_T] = 0
        if "patches" not in batch:
            return
        patches_PC, grids_I3 = batch["patches"][row], batch["grids"][row]
        at = number = 0
        for d in self._index(np.array(starts)).tolist():
            for item, size in zip(self.items_D[d], self.fits_D[d], strict=True):
                pixels, grid = images.to_patches(item.read(), size, self.vision)
                patches_PC[at : at + len(pixels)] = pixels.reshape(len(pixels), -1)
                grids_I3[number] = grid
                at, number = at + len(pixels), number + 1

    def _index(self, start_D: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.offsets_M, start_D)


def make_store(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    vision: Vision,
    room: Room,
    title: str,
) -> MediaStore:
    """Tokens of all examples: <bos> text <eod>, items expanded. Reads no pixels.

    Images too large for `room` are scaled down to fit it.

    Raises:
      UserError: marks and items do not match, a clip is too long, an item has no room,
        or there are fewer than two examples; names the example.
    """
    tokens, items_D, fits_D = [], [], []
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        try:
            fits = tuple(_fit(item, vision, room) for item in example.items)
            grids = [
                (item.frames, size.rows, size.columns)
                for item, size in zip(example.items, fits, strict=True)
            ]
            ids = _encode(example.text, tokenizer, vision.placeholder)
            tokens.append(
                expand(ids, np.array(grids), vision.placeholder, vision.merge)
            )
        except UserError as error:
            raise UserError(f"{example.name}: {error}") from None
        items_D.append(example.items)
        fits_D.append(fits)
        digest.update(f"{[item.name for item in example.items]} {grids}".encode())
    if len(tokens) < 2:
        raise UserError(
            f"{title} has {len(tokens)} documents, at least 2 are needed: one to learn "
            "from and one held out"
        )
    tokens_N = np.concatenate(tokens)
    offsets_M = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    digest.update(tokens_N.tobytes() + offsets_M.tobytes())
    return MediaStore(
        tokens_N,
        offsets_M,
        digest.hexdigest(),
        title,
        tuple(items_D),
        tuple(fits_D),
        vision,
    )


def _fit(item: Item, vision: Vision, room: Room) -> images.Fit:
    try:
        if not 1 <= item.frames <= vision.max_frames:
            raise UserError(
                f"{item.frames} frames, config.model.vision.max_frames="
                f"{vision.max_frames}; cut the clip into shorter ones, each with its "
                f"own {MARK}"
            )
        each = room.patches // item.frames
        return images.fit_into(item.height, item.width, vision, each)
    except UserError as error:
        raise UserError(f"{item.name}: {error}") from None


def _encode(text: str, tokenizer: Tokenizer, placeholder: int) -> np.ndarray:
    pieces: list[Sequence[int] | np.ndarray] = [[tokenizer.bos]]
    for number, part in enumerate(text.split(MARK)):
        if number:
            pieces.append([placeholder])
        pieces.append(tokenizer.encode(part.encode()))
    return np.concatenate([*pieces, [tokenizer.eod]]).astype(np.uint32)
