"""The byte tokenizer: every byte is a token, so no vocabulary file is needed.

    0..255     the bytes
    256 <pad>  positions that hold no text
    257 <bos>  opens every document; predicts its first byte
    258 <eod>  closes every document
    259..271   reserved, for roles and tools of later training stages

`bytes_per_token` turns a loss per token into bits per byte, the figure that can be
compared between tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class ByteTokenizer:
    """Bytes and 16 special tokens; vocabulary of 272."""

    num_specials = 16
    vocab_size = 256 + num_specials
    pad = 256
    bos = 257
    eod = 258

    @property
    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that a token stands for, float32 [W]: 1 for a byte, else 0."""
        return (np.arange(self.vocab_size) < 256).astype(np.float32)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of `text`, uint16 [N] with N its length; no specials are added."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The text of `tokens`; specials vanish, broken UTF-8 becomes U+FFFD.

        Args:
          tokens: integer ids, any iterable or array [N].

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        ids_N = np.asarray(
            tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64
        )
        wrong = ids_N[(ids_N < 0) | (ids_N >= self.vocab_size)]
        if wrong.size:
            raise ValueError(
                f"token {wrong[0]} is outside 0..{self.vocab_size - 1}; sample from "
                f"the first {self.vocab_size} logits only"
            )
        return bytes(ids_N[ids_N < 256].astype(np.uint8)).decode(errors="replace")
