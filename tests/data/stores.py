"""Token stores in memory in which every token says where it is."""

import numpy as np

from kimi_jax.data.documents import Documents, MemoryStore
from kimi_jax.data.tokenizer import ByteTokenizer

PAD, BOS, EOD = ByteTokenizer.pad, ByteTokenizer.bos, ByteTokenizer.eod


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
