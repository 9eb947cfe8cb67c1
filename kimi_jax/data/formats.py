"""From one file to its documents, as a stream: nothing is ever held whole.

    .jsonl .ndjson               one document a line, its string under "text"
    .json.gz .json.zst           the same; so are large corpora published
    .parquet                     one a row, column "text"
    .array_record .arrayrecord   one a record, its bytes being the text
    anything else                one document, the file's bytes

A last suffix .gz or .zst means compressed. A document is an iterable of pieces that
make up its text when joined, so that one long document need not fit in memory; it has
to be read before the next one is asked for. No pieces, or only white space, is an
empty document.

A file that is cut short or damaged is refused by name, wherever its format can tell:
gzip, zstd, parquet and ArrayRecord can, a line of JSON can, plain text cannot.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from etils import epath

from kimi_jax.errors import UserError

Document = Iterable[bytes]
Advance = Callable[[int], None]  # told how many bytes of input were read just now

_CHUNK = 1 << 18
_BATCH = 256  # rows or records read at a time
_PROBE = 1 << 16  # a NUL byte this early marks a binary file
_COMPRESSIONS = (".gz", ".zst")
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}


def kind_of(name: str) -> tuple[str, str]:
    """("text", "jsonl", "parquet" or "array_record"; "", ".gz" or ".zst")."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix not in _COMPRESSIONS:
        return _KINDS.get(suffix, "text"), ""
    inner = os.path.splitext(stem)[1]
    if inner == ".json" or _KINDS.get(inner) == "jsonl":
        return "jsonl", suffix
    return "text", suffix


def read_documents(path: epath.Path, advance: Advance) -> Iterator[Document]:
    """The documents of the file `path`, by the format that its name tells.

    Raises:
      UserError: the file cannot be read, is damaged or cut short, is binary, or a line
        or column does not hold text.
    """
    kind, compression = kind_of(path.name)
    if kind == "parquet":
        yield from _parquet(path, advance)
    elif kind == "array_record":
        yield from _array_record(path, advance)
    elif kind == "jsonl":
        yield from _jsonl(path, _chunks(path, compression, advance))
    else:
        text = read_text(path, compression, advance)
        if text is None:
            raise UserError(
                f"source {str(path)!r} is binary (it holds NUL bytes); extract its "
                "text to a .txt or .jsonl file first"
            )
        yield text


def read_text(path: epath.Path, compression: str, advance: Advance) -> Document | None:
    """The bytes of the file `path`, decompressed, as one document; None if binary."""
    chunks = _chunks(path, compression, advance)
    first = next(chunks, b"")
    if b"\0" in first[:_PROBE]:
        chunks.close()
        return None
    return itertools.chain([first], chunks)


def optional(module: str, package: str, why: str) -> Any:
    """An optional library; absent, the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{why} needs the package {package}; run `pip install {package}` or "
            "`pip install -e .[data]`"
        ) from error


@contextlib.contextmanager
def _naming(path: epath.Path, *damage: type[BaseException]) -> Iterator[None]:
    """Turns what a library raises about `path` into one error that names it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno is None:  # not from the system: pyarrow, of a wrong checksum
            raise _damaged(path, str(error)) from error
        raise UserError(
            f"source {str(path)!r} cannot be read ({error.strerror}); check its "
            "permissions and the disk, or set --config.data.sources to another"
        ) from error
    except damage as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: epath.Path, how: str) -> UserError:
    return UserError(
        f"source {str(path)!r} is damaged or cut short ({how}); copy or download this "
        "file again, or take it out of config.data.sources"
    )


def _chunks(
    path: epath.Path, compression: str, advance: Advance
) -> Generator[bytes, None, None]:
    damage: type[BaseException] = zlib.error
    new: Callable[[], Any] = functools.partial(zlib.decompressobj, wbits=31)
    if compression == ".zst":
        zstd = optional("zstandard", "zstandard", f"source {str(path)!r}")
        damage = zstd.ZstdError
        # Files made with --long need more than the library's default window.
        new = zstd.ZstdDecompressor(max_window_size=2**31).decompressobj
    with _naming(path, damage), path.open("rb") as file:
        raw = _raw(file, advance)
        yield from _decompressed(raw, new, path) if compression else raw


def _raw(file: Any, advance: Advance) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        advance(len(chunk))
        yield chunk


def _decompressed(
    chunks: Iterator[bytes], new: Callable[[], Any], path: epath.Path
) -> Iterator[bytes]:
    """One compressed stream after another, as `cat a.gz b.gz` makes them."""
    stream, ended = None, False
    for chunk in chunks:
        while chunk:
            if stream is None:
                # Tapes and block devices pad files with zeros.
                chunk = chunk.lstrip(b"\0") if ended else chunk
                if not chunk:
                    break
                stream, ended = new(), False
            if text := stream.decompress(chunk):
                yield text
            chunk = b""
            if stream.eof:
                chunk, stream, ended = stream.unused_data, None, True
    if not ended:
        raise _damaged(path, "the compressed stream does not end")


def _jsonl(path: epath.Path, chunks: Iterator[bytes]) -> Iterator[Document]:
    for number, line in enumerate(_lines(chunks), start=1):
        if not line.strip():
            continue
        where = f"source {str(path)!r}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: not JSON ({error}); every line must be an object like "
                '{"text": "..."}. If it is the last line, the file may be cut short'
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f'{where}: no string under "text"; every line must be an object like '
                '{"text": "..."}'
            )
        try:
            yield (text.encode(),)
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: the text is not valid Unicode ({error.reason}); "
                "re-encode it or remove the line"
            ) from error


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        begun.append(first)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun = [rest[-1]]
    if begun:
        yield b"".join(begun)


def _parquet(path: epath.Path, advance: Advance) -> Iterator[Document]:
    why = f"source {str(path)!r}"
    pa = optional("pyarrow", "pyarrow", why)
    parquet = optional("pyarrow.parquet", "pyarrow", why)
    with _naming(path, pa.ArrowException), path.open("rb") as opened:
        file = parquet.ParquetFile(opened, page_checksum_verification=True)
        schema = file.schema_arrow
        if "text" not in schema.names:
            raise UserError(
                f'{why}: no column "text"; it has {schema.names}; rename one of them'
            )
        kind = schema.field("text").type
        if kind not in (
            pa.string(),
            pa.large_string(),
            pa.binary(),
            pa.large_binary(),
        ):
            raise UserError(
                f'{why}: column "text" is of type {kind}; it must hold strings'
            )
        size = path.stat().length
        for batch in file.iter_batches(_BATCH, columns=["text"]):
            advance(size * len(batch) // max(1, file.metadata.num_rows))
            # As bytes, because a string column need not be valid UTF-8.
            for text in batch.column(0).cast(pa.large_binary()).to_pylist():
                yield (text,) if text else ()


def _array_record(path: epath.Path, advance: Advance) -> Iterator[Document]:
    module = optional(
        "array_record.python.array_record_module",
        "array_record",
        f"source {str(path)!r}",
    )
    with _naming(path, RuntimeError, ValueError), _local(path) as local:
        reader = module.ArrayRecordReader(local)
        try:
            if not reader.ok():
                raise _damaged(path, "its footer is missing")
            count, size = reader.num_records(), path.stat().length
            for start in range(0, count, _BATCH):
                records = reader.read(start, min(start + _BATCH, count))
                advance(size * len(records) // count)
                for text in records:
                    yield (text,)
        finally:
            reader.close()


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[str]:
    """A name on the local disk, for a library that opens nothing else."""
    name = os.fspath(path)
    if "://" not in name:
        # The library itself aborts the process for a file that it may not open.
        with open(name, "rb"):
            pass
        yield name
        return
    with tempfile.NamedTemporaryFile(suffix=".array_record") as copy:
        with path.open("rb") as opened:
            shutil.copyfileobj(opened, copy)
        copy.flush()
        yield copy.name
