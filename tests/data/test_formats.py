"""Every format: its documents, a damaged twin, a twin cut short."""

import gzip
import io
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from kimi_jax.data import formats
from kimi_jax.errors import UserError

RNG = random.Random(0)
# Enough text, and random enough, that damage in the middle hits compressed data.
TEXTS = [
    "one\ntwo",
    "木 — café",
    *(f"{RNG.getrandbits(120):030x}" for _ in range(3000)),
]
JSONL = "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in TEXTS).encode()


def ignore(size: int) -> None:
    del size


def read(path: Path) -> list[bytes]:
    found = formats.read_documents(epath.Path(path), ignore)
    return [b"".join(document) for document in found]


def parquet(texts: object = TEXTS, **columns: object) -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"id": list(range(len(TEXTS))), "text": texts} | columns)
    pq.write_table(table, buffer, write_page_checksum=True, row_group_size=1000)
    return buffer.getvalue()


def array_record(tmp_path: Path) -> bytes:
    file = tmp_path / "made.array_record"
    writer = ArrayRecordWriter(str(file), "group_size:64")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return file.read_bytes()


def packed(kind: str, tmp_path: Path) -> bytes:
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    if kind == ".parquet":
        return parquet()
    if kind == ".array_record":
        return array_record(tmp_path)
    return {
        ".jsonl": lambda: JSONL,
        ".json.gz": lambda: gzip.compress(JSONL),
        ".jsonl.gz": lambda: gzip.compress(JSONL),
        ".jsonl.zst": lambda: zstd.compress(JSONL),
    }[kind]()


KINDS = (".jsonl", ".json.gz", ".jsonl.gz", ".jsonl.zst", ".parquet", ".array_record")


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_the_bytes_that_were_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"a{kind}"
    file.write_bytes(packed(kind, tmp_path))
    sizes: list[int] = []
    found = formats.read_documents(epath.Path(file), sizes.append)
    assert [b"".join(d).decode() for d in found] == TEXTS
    size = file.stat().st_size
    assert 0.99 * size <= sum(sizes) <= size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0.6, 0.999])
def test_a_file_cut_short_is_named(tmp_path: Path, kind: str, kept: float) -> None:
    file = tmp_path / f"a{kind}"
    content = packed(kind, tmp_path)
    size = int(len(content) * kept)
    # ArrayRecord ends with a block of 64 KiB that tells where it begins.
    file.write_bytes(content[: size if kind != ".jsonl" else size - 3])
    with pytest.raises(UserError, match="cut short") as error:
        read(file)
    assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != ".jsonl"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"a{kind}"
    content = bytearray(packed(kind, tmp_path))
    # The middle of a file may be an index or padding that nobody reads.
    middle = len(content) // (8 if kind == ".array_record" else 2)
    for i in range(middle, middle + 8):
        content[i] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged or cut short") as error:
        read(file)
    assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != ".jsonl"])
def test_an_empty_file_is_no_packed_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"a{kind}"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is damaged or cut short"):
        read(file)


def test_streams_one_after_another(tmp_path: Path) -> None:
    first, second = b'{"text": "a"}\n', b'{"text": "b"}\n'
    file = tmp_path / "two.jsonl.gz"
    file.write_bytes(gzip.compress(first) + gzip.compress(second) + bytes(512))
    assert read(file) == [b"a", b"b"]
    zstd = zstandard.ZstdCompressor()
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0info"
    file = tmp_path / "two.jsonl.zst"
    file.write_bytes(zstd.compress(first) + skippable + zstd.compress(second))
    assert read(file) == [b"a", b"b"]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match="does not end"):
        read(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 3: not JSON .*may be cut short"),
        (b'{"text": "caf\xe9"}', "line 3: not JSON"),
        (b"[" * 100_000, "line 3: not JSON"),
        (b'{"body": "a"}', 'line 3: no string under "text"'),
        (b'{"text": 3}', 'line 3: no string under "text"'),
        (b"[1]", 'line 3: no string under "text"'),
        (rb'{"text": "\ud800"}', "line 3: the text is not valid Unicode"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    tmp_path: Path, line: bytes, message: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=message) as error:
        read(file)
    assert "a.jsonl" in str(error.value)


def test_lines_longer_than_a_read(tmp_path: Path) -> None:
    texts = ["x" * 3 * formats._CHUNK, "", "y" * (formats._CHUNK - 20), "z"]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert read(file) == [text.encode() for text in texts]


def test_text_is_one_document_of_any_bytes(tmp_path: Path) -> None:
    content = b"caf\xe9\r\n\r\nnext \xff" * 100_000
    file = tmp_path / "play.txt"
    file.write_bytes(content)
    assert read(file) == [content]
    file = tmp_path / "play.txt.gz"
    file.write_bytes(gzip.compress(content))
    assert read(file) == [content]
    file.write_bytes(gzip.compress(content)[:-5])
    with pytest.raises(UserError, match="cut short"):
        read(file)
    file = tmp_path / "play.bin"
    file.write_bytes(b"a\0b")
    with pytest.raises(UserError, match=r"binary \(it holds NUL bytes\); extract"):
        read(file)


def test_parquet_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    nothing = [None, *TEXTS[1:]]
    file.write_bytes(parquet(nothing))
    assert read(file) == [b"", *(text.encode() for text in TEXTS[1:])]
    broken = [b"caf\xe9"] * len(TEXTS)
    file.write_bytes(parquet(pa.array(broken, pa.binary())))
    assert read(file) == broken
    file.write_bytes(parquet(list(range(len(TEXTS)))))
    with pytest.raises(UserError, match='"text" is of type int64'):
        read(file)
    pq.write_table(pa.table({"body": ["a"]}), file)
    with pytest.raises(UserError, match=r"no column \"text\"; it has \['body'\]"):
        read(file)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.array_record"
    file.write_bytes(array_record(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        read(file)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("pyarrow", ".parquet"),
        ("zstandard", ".jsonl.zst"),
        ("array_record.python.array_record_module", ".array_record"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, kind) -> None:
    file = tmp_path / f"a{kind}"
    file.write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(UserError, match=rf"`pip install {package}`"):
        read(file)


def test_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for kind in KINDS:
        file = tmp_path / f"a{kind}"
        file.write_bytes(packed(kind, tmp_path))
        found = formats.read_documents(epath.Path(file), ignore)
        next(found)
        found.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before
