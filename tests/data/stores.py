"""Token stores in memory in which every token says where it is."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.data.documents import Documents
from kimi_jax.data.tokenizer import ByteTokenizer

PAD, BOS, EOD = ByteTokenizer.pad, ByteTokenizer.bos, ByteTokenizer.eod


class MemoryStore(NamedTuple):
    """A token store without a file."""

    tokens_N: np.ndarray
    offsets_M: np.ndarray
    documents: int
    digest: str
    title: str = "in memory"


def memory_store(texts: Sequence[bytes]) -> MemoryStore:
    """`texts`, a document each, by the byte tokenizer."""
    tokenizer = ByteTokenizer()
    offsets_M = np.cumsum([0, *(len(text) + 2 for text in texts)], dtype=np.int64)
    tokens_N = np.empty(offsets_M[-1], np.uint16)
    for text, start, end in zip(texts, offsets_M[:-1], offsets_M[1:], strict=True):
        tokens_N[start] = tokenizer.bos
        tokens_N[start + 1 : end - 1] = tokenizer.encode(text)
        tokens_N[end - 1] = tokenizer.eod
    digest = hashlib.blake2b(tokens_N.tobytes(), digest_size=16).hexdigest()
    return MemoryStore(tokens_N, offsets_M, len(texts), digest)


def random_store(sizes, seed: int = 0) -> MemoryStore:
    """Documents of `sizes` tokens: <bos>, random bytes, <eod>."""
    rng = np.random.default_rng(seed)
    offsets_M = np.cumsum([0, *sizes]).astype(np.int64)
    tokens_N = rng.integers(0, 256, offsets_M[-1]).astype(np.uint16)
    tokens_N[offsets_M[:-1]] = BOS
    tokens_N[offsets_M[1:] - 1] = EOD
    return MemoryStore(tokens_N, offsets_M, len(sizes), f"random {seed}")


def counting_documents(sizes) -> Documents:
    """Token n is the number n."""
    end_D = np.cumsum(sizes).astype(np.int64)
    return Documents(np.arange(end_D[-1], dtype=np.uint32), end_D - sizes, end_D)
