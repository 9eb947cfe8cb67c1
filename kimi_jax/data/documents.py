"""The documents of a token store: which are held out, and how long they are.

A store holds its documents one after the other, each as <bos> text <eod>. Subsets of
them are kept as places in the store; no token is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kimi_jax.data.permutation import uniform

if TYPE_CHECKING:
    from kimi_jax.data.media import MediaStore


class TokenStore(Protocol):
    """Tokens of one source, in memory or on disk."""

    @property
    def tokens_N(self) -> np.ndarray: ...  # uint16 or uint32
    @property
    def offsets_M(self) -> np.ndarray: ...  # int64, [documents + 1]; from 0 to N
    @property
    def documents(self) -> int: ...
    @property
    def digest(self) -> str: ...  # of the content
    @property
    def title(self) -> str: ...  # for people


class Documents(NamedTuple):
    """Some documents of a store: document d is tokens_N[start_D[d]:end_D[d]]."""

    tokens_N: np.ndarray
    start_D: np.ndarray
    end_D: np.ndarray
    media: MediaStore | None = None  # the store, if its documents show images

    @property
    def sizes_D(self) -> np.ndarray:
        """Tokens of each, <bos> and <eod> included."""
        return self.end_D - self.start_D

    def select(self, keep_D: np.ndarray) -> Documents:
        """Those for which `keep_D` is true."""
        return self._replace(start_D=self.start_D[keep_D], end_D=self.end_D[keep_D])


class Split(NamedTuple):
    """Documents to learn from, and documents held out."""

    train: Documents
    validation: Documents


def hold_out(store: TokenStore, validation_fraction: float, seed: int) -> Split:
    """Holds out whole documents for validation.

    Document i is held out if a hash of (seed, i) says so: appending documents to a
    source, or adding a source, moves none of the old ones to the other side. At least
    one document lands on each side. A source of a single document is cut in two, its
    end being held out.

    Args:
      store: at least one document.
      validation_fraction: expected share of the documents, in (0, 1).
      seed: another seed holds out other documents.

    Raises:
      ValueError: the fraction is outside (0, 1), or there is too little text to split.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction}, expected above 0 and "
            "below 1; 0.05 is usual"
        )
    # A view without memmap's slower indexing; it stays on disk.
    tokens_N = np.asarray(store.tokens_N)
    start_D, end_D = np.asarray(store.offsets_M[:-1]), np.asarray(store.offsets_M[1:])
    if store.documents == 1:
        size = len(tokens_N)
        cut = size - round(size * validation_fraction)
        if not 2 <= cut <= size - 2:
            raise ValueError(
                f"the source is one document of {size} tokens, too short to hold out "
                f"{validation_fraction:.0%}; add text or raise validation_fraction"
            )
        cut_D = np.array([cut])
        return Split(
            Documents(tokens_N, start_D, cut_D), Documents(tokens_N, cut_D, end_D)
        )
    draws_D = uniform(np.arange(store.documents), seed)
    held_out_D = draws_D < validation_fraction
    held_out_D[draws_D.argmin()] = True
    held_out_D[draws_D.argmax()] = False
    documents = Documents(tokens_N, start_D, end_D)
    return Split(documents.select(~held_out_D), documents.select(held_out_D))


def by_length(documents: Documents, boundaries: Sequence[int]) -> list[Documents]:
    """The strata of `documents`: stratum s has boundaries[s - 1] <= size < [s]."""
    stratum_D = np.searchsorted(np.asarray(boundaries), documents.sizes_D, side="right")
    return [documents.select(stratum_D == s) for s in range(len(boundaries) + 1)]


def stratum_name(boundaries: Sequence[int], stratum: int) -> str:
    """ "512 to 4,095 tokens"."""
    if not boundaries:
        return "all lengths"
    if stratum == len(boundaries):
        return f"{boundaries[-1]:,} tokens and more"
    low = boundaries[stratum - 1] if stratum else 0
    return f"{low:,} to {boundaries[stratum] - 1:,} tokens"
