"""What a tokenizer is, and the byte tokenizer, which needs no vocabulary file.

    0..255     the bytes
    256 <pad>  positions that hold no text
    257 <bos>  opens every document; predicts its first byte
    258 <eod>  closes every document
    259..263   <end> <system> <user> <assistant> <tool>, of conversations
    264..271   reserved

`bytes_per_token` turns a loss per token into bits per byte, the figure that can be
compared between tokenizers. Tokenizers with a file are in `tokenizer_files`.

For generated tasks that are no text there is `SymbolTokenizer`: ids are the symbols.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from kimi_jax.errors import UserError


class Tokenizer(Protocol):
    """Text to ids in 0..vocab_size-1 and back.

    `bos` and `eod` differ and stand in no encoded text, so that they alone mark where
    documents begin and end. `pad` fills positions without text and may equal `eod`.
    """

    @property
    def name(self) -> str:
        """As `config.data.tokenizer` names it."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int: ...

    @property
    def eod(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def needs_text(self) -> bool:
        """Bytes that are not UTF-8 become U+FFFD; otherwise they are kept."""

    @property
    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that a token stands for, float32 [vocab_size]; 0: special."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of special tokens by name, as far as they have one."""

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of `text`, [N], without specials, whatever the text spells."""

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The text of ids; specials vanish, broken UTF-8 becomes U+FFFD."""


_ROLES = ("<end>", "<system>", "<user>", "<assistant>", "<tool>")


class ByteTokenizer:
    """Bytes and 16 special tokens; vocabulary of 272."""

    name = "bytes"
    fingerprint = "bytes-272"
    num_specials = 16
    vocab_size = 256 + num_specials
    pad = 256
    bos = 257
    eod = 258
    needs_text = False
    specials: Mapping[str, int] = types.MappingProxyType(
        {name: 256 + i for i, name in enumerate(["<pad>", "<bos>", "<eod>", *_ROLES])}
    )

    @property
    def bytes_per_token(self) -> np.ndarray:
        """float32 [W]: 1 for a byte, 0 for a special."""
        return (np.arange(self.vocab_size) < 256).astype(np.float32)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of `text`, uint16 [N] with N its length; no specials are added."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The text of `tokens`; specials vanish, broken UTF-8 becomes U+FFFD.

        Args:
          tokens: integer ids, any iterable or array [N].

        Raises:
          UserError: an id is outside the vocabulary.
        """
        ids_N = checked_ids(tokens, self.vocab_size)
        return bytes(ids_N[ids_N < 256].astype(np.uint8)).decode(errors="replace")


class SymbolTokenizer:
    """Symbols 0 to N - 1, written as numbers; then <pad>, <bos>, <eod>.

    A symbol counts as one byte, so that bits per byte are bits per symbol.
    """

    needs_text = True
    specials: Mapping[str, int] = types.MappingProxyType({})

    def __init__(self, symbols: int):
        self.name = f"symbols:{symbols}"
        self.fingerprint = self.name
        self.vocab_size = symbols + 3
        self.pad, self.bos, self.eod = range(symbols, symbols + 3)

    @property
    def bytes_per_token(self) -> np.ndarray:
        """float32 [W]: 1 for a symbol, 0 for a special."""
        return (np.arange(self.vocab_size) < self.pad).astype(np.float32)

    def encode(self, text: bytes) -> np.ndarray:
        """The symbols of text such as b"3 17", uint32 [N].

        Raises:
          UserError: the text is not numbers below N.
        """
        words = text.decode(errors="replace").split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.pad:
                raise UserError(
                    f"{word[:40]!r} is no token of {self.name!r}, which has the "
                    f"numbers 0 to {self.pad - 1}; write them with spaces between "
                    f"them, as in '0 {self.pad - 1} 1'"
                )
        return np.array([int(word) for word in words], np.uint32)

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The numbers of symbols with spaces between them; specials vanish."""
        ids_N = checked_ids(tokens, self.vocab_size)
        return " ".join(str(i) for i in ids_N[ids_N < self.pad].tolist())


def checked_ids(tokens: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """`tokens` as int64 [N].

    Raises:
      UserError: an id is outside 0..vocab_size-1.
    """
    ids_N = np.asarray(
        tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64
    )
    wrong = ids_N[(ids_N < 0) | (ids_N >= vocab_size)]
    if wrong.size:
        raise UserError(
            f"token {wrong[0]} is outside 0..{vocab_size - 1}; sample from "
            f"the first {vocab_size} logits only"
        )
    return ids_N
