"""Tokenise a source once, shard by shard, so that a kill loses seconds.

Tokens and offsets are appended to the two files of the store. A journal beside them
notes, after a shard, how much is whole by then and which input it came from:

    STORE/journal.jsonl   {"shards": 3, "identity": ..., "tokens": 91212, ...}

A later call keeps what came from unchanged shards, cuts the rest off and goes on; the
bytes are the same as without the kill. store.json is written last and makes it a store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from kimi_jax.data import sources, store
from kimi_jax.data.formats import Document
from kimi_jax.data.store import TokenStore
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError
from kimi_jax.locks import locked
from kimi_jax.monitor.metrics import replace_file

JOURNAL, LOCK = "journal.jsonl", ".lock"
# Longer documents are encoded in pieces: libraries overflow their stack on long runs.
PIECE = 1 << 18
_LINE = re.compile(rb"\n(?=\S)")
_COMMIT_SECONDS = 2.0  # a journal line a file would slow down a million small ones
_REPORT_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a build has come."""

    shards_done: int
    shards: int
    bytes_read: int  # of the input files
    bytes_total: int
    documents: int
    tokens: int
    eta_seconds: float | None  # None until it can be told


@dataclasses.dataclass
class _Counts:
    """What a prefix of the shards gave; a line of the journal."""

    shards: int = 0
    identity: str = ""  # of these shards
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    text_bytes: int = 0
    token_bytes: int = 0
    replaced: int = 0


def prepare_store(
    source: str,
    tokenizer: Tokenizer,
    path: str | pathlib.Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> TokenStore:
    """The store of a run: opened if `source` is one or if it has been made, else made.

    Once `path` holds the finished store of this source, the source is not looked at
    again, so that a run keeps its data whatever becomes of the files.

    Args:
      source: a token store's folder, or see `sources`.
      tokenizer: of the run.
      path: folder for the store of a source that is not one.
      progress: see `build_store`.

    Raises:
      UserError: see `open_store`, `build_store`; `path` holds another source's store.
    """
    if source and store.holds_store(source):
        return store.open_store(source, tokenizer)
    if store.is_store(path):
        made = store.open_store(path, tokenizer)
        _check_source(made.path, made.meta.source, source)
        return made
    return build_store(source, tokenizer, path, progress=progress)


def build_store(
    source: str,
    tokenizer: Tokenizer,
    path: str | pathlib.Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> TokenStore:
    """Tokenises `source` into the folder `path`, going on where an earlier call ended.

    Args:
      source: see `sources`.
      tokenizer: see `tokenizer_files.load_tokenizer`.
      path: a folder that does not exist, is empty, or holds the same store, finished or
        not.
      progress: called about twice a second, and at the end.

    Raises:
      UserError: a shard is damaged (it is named; what was noted before it is kept),
        there is no text, the folder holds anything else, or another process builds it.
    """
    folder = pathlib.Path(path).expanduser()
    if source and store.holds_store(source):
        raise UserError(
            f"source {source!r} is a token store, there is nothing to tokenise; train "
            f"with --config.data.sources={source}"
        )
    listed = sources.list_source(source)
    if store.is_store(folder):
        made = store.open_store(folder, tokenizer)
        _check_source(folder, made.meta.source, source)
        if made.meta.source_identity != sources.identities(listed.shards)[-1]:
            raise UserError(
                f"token store {str(folder)!r} is finished, but its source {source!r} "
                "has changed since; delete the folder to tokenise again, or name "
                "another"
            )
        return made
    _claim(folder)
    with locked(folder / LOCK, _taken(folder)):
        builder = _Builder(folder, listed, tokenizer, progress)
        try:
            builder.run()
        except OSError as error:
            raise UserError(
                f"token store {str(folder)!r} cannot be written ({error.strerror}); "
                "free space or name another folder. The same command goes on from here"
            ) from error
    return store.open_store(folder, tokenizer)


def pieces(document: Document, limit: int = PIECE) -> Iterator[bytes]:
    """The text of `document` in pieces of at most `limit` bytes, cut between words.

    A cut falls before a line that begins with a word, where every usual pattern cuts
    too, so that pieces encode as the whole does; without such a line, between two
    characters.
    """
    rest = b""
    for chunk in document:
        text, start = rest + chunk if rest else chunk, 0
        while len(text) - start > limit:
            end = start + _cut(text[start : start + limit + 1])
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _cut(text: bytes) -> int:
    """Where to cut `text`, before its last byte."""
    cut = 0
    for line in _LINE.finditer(text, len(text) // 2):
        cut = line.end()
    if cut:
        return cut
    cut = len(text) - 1
    # At most three bytes of a character come after its first.
    while cut > max(1, len(text) - 4) and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


class _Builder:
    """One call of `build_store`: the open files and the counts so far."""

    def __init__(
        self,
        folder: pathlib.Path,
        source: sources.Source,
        tokenizer: Tokenizer,
        progress: Callable[[Progress], None] | None,
    ):
        self._folder, self._source, self._tokenizer = folder, source, tokenizer
        self._progress = progress
        self._dtype = np.dtype(store.dtype_of(tokenizer.vocab_size)).newbyteorder("<")
        self._bytes_W = tokenizer.bytes_per_token
        self._bos = np.array([tokenizer.bos], self._dtype).tobytes()
        self._eod = np.array([tokenizer.eod], self._dtype).tobytes()
        self._sizes = [shard.size for shard in source.shards]
        self._identities = sources.identities(source.shards)
        self._read = 0
        self._started = self._committed = self._reported = time.monotonic()

    def run(self) -> None:
        header = {
            "source": self._source.name,
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
        }
        self._counts = self._resume(header)
        self._read = self._resumed = sum(self._sizes[: self._counts.shards])
        with (
            self._appended(
                store.TOKENS, self._counts.tokens, self._dtype.itemsize
            ) as t,
            self._appended(store.OFFSETS, self._counts.documents, 8) as o,
            open(self._folder / JOURNAL, "ab") as journal,
        ):
            self._tokens, self._offsets = t, o
            while self._counts.shards < len(self._source.shards):
                self._write_shard(self._source.shards[self._counts.shards])
                self._commit(journal)
            self._commit(journal, last=True)
            self._finish()

    def _resume(self, header: dict[str, str]) -> _Counts:
        """The counts of the last journal line whose shards are unchanged."""
        journal = self._folder / JOURNAL
        lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
        counts, kept = _Counts(), [json.dumps(header).encode()]
        try:
            begun, *notes = map(json.loads, lines or kept)
            notes = [_Counts(**note) for note in notes]
        except (ValueError, TypeError) as error:
            raise UserError(_damaged(self._folder, f"{JOURNAL} ({error})")) from error
        _check_source(self._folder, begun["source"], self._source.name)
        name, fingerprint = begun["tokenizer"], begun["tokenizer_fingerprint"]
        store.check_tokenizer(self._folder, name, fingerprint, self._tokenizer)
        for note, line in zip(notes, lines[1:], strict=True):
            if note.identity not in self._identities[note.shards : note.shards + 1]:
                break
            counts = note
            kept.append(line)
        replace_file(journal, b"\n".join(kept) + b"\n")
        return counts

    @contextlib.contextmanager
    def _appended(self, name: str, count: int, itemsize: int) -> Iterator[IO[bytes]]:
        """The file `name` cut to `count` items, to write behind them."""
        with open(self._folder / name, "ab", buffering=1 << 20) as file:
            if file.tell() < count * itemsize:
                raise UserError(_damaged(self._folder, f"{name} (too short)"))
            file.truncate(count * itemsize)
            yield file

    def _write_shard(self, shard: sources.Shard) -> None:
        end = self._read + shard.size

        def advance(size: int) -> None:
            self._read = min(self._read + size, end)

        for document in shard.read(advance):
            self._write_document(document)
            self._report()
        self._read = end
        self._counts.shards += 1

    def _write_document(self, document: Document) -> None:
        counts, parts = self._counts, pieces(document)
        blank = []
        for piece in parts:
            blank.append(piece)
            if not piece.isspace():
                break
        else:
            counts.empty += 1
            return
        self._offsets.write(counts.tokens.to_bytes(8, "little"))
        self._tokens.write(self._bos)
        counts.tokens += 2
        for piece in itertools.chain(blank, parts):
            self._write_piece(piece)
            self._report()
        self._tokens.write(self._eod)
        counts.documents += 1

    def _write_piece(self, text: bytes) -> None:
        tokenizer, counts = self._tokenizer, self._counts
        ids_N = tokenizer.encode(text)
        self._check(ids_N)
        self._tokens.write(ids_N.astype(self._dtype, copy=False).tobytes())
        counts.tokens += len(ids_N)
        counts.text_bytes += len(text)
        counts.token_bytes += int(self._bytes_W[ids_N].sum(dtype=np.float64))
        if tokenizer.needs_text:
            counts.replaced += num_replaced(text)

    def _check(self, ids_N: np.ndarray) -> None:
        tokenizer = self._tokenizer
        if ids_N.size and int(ids_N.max()) >= tokenizer.vocab_size:
            raise UserError(
                f"tokenizer {tokenizer.name!r} gave token {int(ids_N.max())}, outside "
                f"its vocabulary of {tokenizer.vocab_size}; its file is damaged"
            )
        if ((ids_N == tokenizer.bos) | (ids_N == tokenizer.eod)).any():
            raise UserError(
                f"tokenizer {tokenizer.name!r} puts <bos> or <eod> into text, where "
                "they would pass for the borders of documents; name other special "
                "tokens in tokenizer_config.json beside it"
            )

    def _commit(self, journal: IO[bytes], last: bool = False) -> None:
        """Makes what was written durable and notes it."""
        now = time.monotonic()
        if not last and now - self._committed < _COMMIT_SECONDS:
            return
        _sync(self._tokens)
        _sync(self._offsets)
        self._counts.identity = self._identities[self._counts.shards]
        line = json.dumps(dataclasses.asdict(self._counts))
        journal.write(line.encode() + b"\n")
        _sync(journal)
        self._committed = now

    def _finish(self) -> None:
        counts, tokenizer, folder = self._counts, self._tokenizer, self._folder
        if not counts.documents:
            raise UserError(
                f"source {self._source.name!r} holds no text ({counts.empty} documents "
                "or files are empty or binary); set --config.data.sources to text"
            )
        self._offsets.write(counts.tokens.to_bytes(8, "little"))
        _sync(self._offsets)
        values: dict[str, Any] = dataclasses.asdict(counts)
        del values["shards"], values["identity"]
        meta = store.Meta(
            version=store.VERSION,
            source=self._source.name,
            title=self._source.title,
            source_identity=counts.identity,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            bos=tokenizer.bos,
            eod=tokenizer.eod,
            pad=tokenizer.pad,
            dtype=self._dtype.name,
            digest=store.content_digest(folder, self._dtype.name),
            **values,
        )
        text = json.dumps(dataclasses.asdict(meta), indent=2) + "\n"
        replace_file(folder / store.META, text)
        (folder / JOURNAL).unlink()
        self._report(last=True)

    def _report(self, last: bool = False) -> None:
        now = time.monotonic()
        if self._progress is None or (
            not last and now - self._reported < _REPORT_SECONDS
        ):
            return
        self._reported = now
        total, since = sum(self._sizes), self._read - self._resumed
        left = (now - self._started) * (total - self._read)
        self._progress(
            Progress(
                shards_done=self._counts.shards,
                shards=len(self._sizes),
                bytes_read=self._read,
                bytes_total=total,
                documents=self._counts.documents,
                tokens=self._counts.tokens,
                eta_seconds=left / since if since else None,
            )
        )


def num_replaced(text: bytes) -> int:
    """How many U+FFFD stand for invalid bytes when `text` is read as UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        mark = "\N{REPLACEMENT CHARACTER}"
        return text.decode(errors="replace").count(mark) - text.count(mark.encode())
    return 0


def _damaged(folder: pathlib.Path, what: str) -> str:
    return (
        f"unfinished token store {str(folder)!r}: its {what} is damaged; delete the "
        "folder and tokenise again"
    )


def _check_source(folder: pathlib.Path, stored: str, wanted: str) -> None:
    if stored != wanted:
        raise UserError(
            f"token store {str(folder)!r} is of the source {stored!r}, not of "
            f"{wanted!r}; name another folder, or delete this one"
        )


def _claim(folder: pathlib.Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file; name a folder for the token store")
    if folder.is_dir() and not (folder / JOURNAL).exists():
        others = [file.name for file in folder.iterdir() if file.name[0] != "."]
        if others:
            raise UserError(
                f"{str(folder)!r} is not empty and holds no token store (it has "
                f"{sorted(others)[0]!r}); name another folder, nothing was written"
            )
    folder.mkdir(parents=True, exist_ok=True)


def _taken(folder: pathlib.Path) -> str:
    return (
        f"token store {str(folder)!r} is being written by another process; wait for "
        "it, or name another folder"
    )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
