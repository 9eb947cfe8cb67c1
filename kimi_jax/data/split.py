"""Which documents are held out for validation."""

from __future__ import annotations

import hashlib

import numpy as np


def held_out(num_documents: int, fraction: float, seed: int) -> np.ndarray:
    """Whether each document is held out, bool [num_documents].

    Document i is held out if a hash of (seed, i) says so: appending documents to the
    corpus moves none of the old ones to the other side. At least one document lands on
    each side.

    Args:
      num_documents: at least 2.
      fraction: expected share of the documents, in (0, 1).
      seed: another seed holds out other documents.

    Raises:
      ValueError: the fraction is outside (0, 1), or there are too few documents.
    """
    check_fraction(fraction)
    if num_documents < 2:
        raise ValueError(f"{num_documents} documents, expected at least 2 to split")
    draws = np.array([_uniform(seed, index) for index in range(num_documents)])
    held = draws < fraction
    held[draws.argmin()] = True
    held[draws.argmax()] = False
    return held


def check_fraction(fraction: float) -> None:
    """Refuses a share outside (0, 1)."""
    if not 0 < fraction < 1:
        raise ValueError(
            f"validation_fraction={fraction}, expected above 0 and below 1; 0.05 is "
            "usual"
        )


def _uniform(seed: int, index: int) -> float:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
