"""The token store: one flat stream of ids on disk, and where its documents begin.

    STORE/tokens.bin     uint16 or uint32, little-endian: <bos> text <eod> <bos> ...
    STORE/offsets.bin    int64 [documents + 1]: where each <bos> stands, then the end
    STORE/store.json     what made it, counts, digest; written last

Opening one reads the small file and maps the large ones, at any size in the same time.
`build_store` writes stores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError

TOKENS, OFFSETS, META = "tokens.bin", "offsets.bin", "store.json"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Meta:
    """The contents of store.json."""

    version: int
    source: str  # as the user named it
    title: str  # the source for people
    source_identity: str  # see `sources.identity`
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos: int
    eod: int
    pad: int
    dtype: str
    tokens: int
    documents: int
    empty: int  # documents left out, as they hold no text
    text_bytes: int
    token_bytes: int  # that the tokens stand for; differs if a tokenizer alters text
    replaced: int  # invalid bytes that became U+FFFD
    digest: str  # of dtype, tokens and offsets

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token, <bos> and <eod> counted as tokens."""
        return self.text_bytes / self.tokens


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """A store that is open for reading.

    Attributes:
      tokens_N: uint16 or uint32 [N], every document as <bos> text <eod>.
      offsets_M: int64 [documents + 1]; document i is
        tokens_N[offsets_M[i] : offsets_M[i + 1]].
    """

    path: pathlib.Path
    tokens_N: np.ndarray
    offsets_M: np.ndarray
    meta: Meta

    @property
    def documents(self) -> int:
        return self.meta.documents

    @property
    def digest(self) -> str:
        """Equal for stores of equal contents."""
        return self.meta.digest

    @property
    def title(self) -> str:
        """What the text is, for people."""
        return self.meta.title

    def verify(self) -> None:
        """Reads everything: the digest and the range of the ids.

        Raises:
          UserError: the contents are not those that were written.
        """
        if content_digest(self.path, self.meta.dtype) != self.digest:
            raise UserError(_broken(self.path, "its contents do not match its digest"))
        largest = max(
            int(self.tokens_N[start : start + (1 << 24)].max())
            for start in range(0, len(self.tokens_N), 1 << 24)
        )
        if largest >= self.meta.vocab_size:
            raise UserError(
                _broken(
                    self.path,
                    f"token {largest} is outside its vocabulary of "
                    f"{self.meta.vocab_size}",
                )
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling a map would copy the whole stream; another process maps it anew.
        return open_store, (self.path,)


def is_store(path: str | pathlib.Path) -> bool:
    """Whether a finished token store is at `path`."""
    return (pathlib.Path(path).expanduser() / META).is_file()


def holds_store(path: str | pathlib.Path) -> bool:
    """Whether a token store is at `path`, be it finished or not."""
    folder = pathlib.Path(path).expanduser()
    return is_store(folder) or all((folder / n).is_file() for n in (TOKENS, OFFSETS))


def open_store(
    path: str | pathlib.Path, tokenizer: Tokenizer | None = None
) -> TokenStore:
    """The store at `path`, mapped into memory.

    Args:
      path: its folder.
      tokenizer: what the caller decodes and trains with, if anything.

    Raises:
      UserError: no store is there, it is truncated or not finished, or another
        tokenizer wrote it.
    """
    folder = pathlib.Path(path).expanduser()
    meta = _read_meta(folder)
    for name, wanted in (
        (TOKENS, meta.tokens * np.dtype(meta.dtype).itemsize),
        (OFFSETS, 8 * (meta.documents + 1)),
    ):
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size != wanted:
            raise UserError(
                _broken(folder, f"{name} has {size:,} bytes and should have {wanted:,}")
            )
    tokens_N = np.memmap(folder / TOKENS, np.dtype(meta.dtype).newbyteorder("<"), "r")
    offsets_M = np.memmap(folder / OFFSETS, "<i8", "r")
    ends = (tokens_N[0], tokens_N[-1], offsets_M[0], offsets_M[-1])
    if tuple(map(int, ends)) != (meta.bos, meta.eod, 0, meta.tokens):
        raise UserError(_broken(folder, "its ends are not those of whole documents"))
    if tokenizer is not None:
        check_tokenizer(folder, meta.tokenizer, meta.tokenizer_fingerprint, tokenizer)
    return TokenStore(folder, tokens_N, offsets_M, meta)


def check_tokenizer(
    folder: pathlib.Path, name: str, fingerprint: str, tokenizer: Tokenizer
) -> None:
    """Refuses a store that another tokenizer wrote."""
    if fingerprint != tokenizer.fingerprint:
        same = name == tokenizer.name
        raise UserError(
            f"token store {str(folder)!r} was written by the tokenizer {name!r}"
            + (", whose file has changed since" if same else "")
            + f", not by {tokenizer.name!r}; set --config.data.tokenizer to the one "
            "that wrote it, or tokenise again into another folder"
        )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a model whose embedding has no row for some token.

    Raises:
      UserError: `vocab_size`, of the model, is below that of the tokenizer.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"config.model.vocab_size={vocab_size}: the tokenizer has "
            f"{tokenizer.vocab_size} tokens ({tokenizer.name}); set "
            f"--config.model.vocab_size={tokenizer.vocab_size} or more"
        )


def dtype_of(vocab_size: int) -> str:
    """ "uint16" if every id fits, else "uint32"."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def content_digest(folder: pathlib.Path, dtype: str) -> str:
    """sha256 over dtype, tokens and offsets as they are on disk."""
    digest = hashlib.sha256(dtype.encode())
    for name in (TOKENS, OFFSETS):
        with open(folder / name, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read_meta(folder: pathlib.Path) -> Meta:
    file = folder / META
    if not file.is_file():
        begun = (folder / TOKENS).is_file()
        raise UserError(
            f"{str(folder)!r} holds "
            + (
                "an unfinished token store; the command that began it finishes it"
                if begun
                else "no token store; make one with python -m experiments.store"
            )
        )
    try:
        values = json.loads(file.read_bytes())
        version = values["version"]
        if version == VERSION:
            return Meta(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(_broken(folder, f"{META} is not readable: {error}")) from error
    raise UserError(
        f"token store {str(folder)!r} is of version {version}, this code reads "
        f"{VERSION}; tokenise again into another folder"
    )


def _broken(folder: pathlib.Path, how: str) -> str:
    return (
        f"token store {str(folder)!r} is truncated or damaged: {how}; copy it again, "
        "or delete the folder and tokenise again"
    )
