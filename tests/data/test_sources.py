"""What a user may name: files, directories, trees, remote paths, the default."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from kimi_jax.data import sources
from kimi_jax.errors import UserError

FILES = {
    "z.py": b"z = 1",
    "a.txt": b"first\n",
    "b/a.md": b"# a",
    "b/lines.jsonl": b'{"text": "x"}\n{"text": "y"}',
    "b/c/deep.txt": b"deep",
    "a-b/x.txt": b"dash",
    ".git/config": b"hidden",
    ".hidden": b"hidden",
    "b/.git/config": b"hidden",
    "image.png": b"\x89PNG\x00\x01",
    "latin.txt": b"caf\xe9",
    "nul.txt": b"a\0b",
    "empty.txt": b" \n",
}


def documents(name: object) -> list[bytes]:
    listed = sources.list_source(str(name))
    return [
        b"".join(document)
        for shard in listed.shards
        for document in shard.read(lambda size: None)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    return tmp_path


def test_directory_files_before_folders_each_by_name(folder: Path) -> None:
    assert documents(folder) == [
        b"first\n",
        b" \n",
        b"",  # image.png
        b"caf\xe9",  # kept, by bytes
        b"",  # nul.txt
        b"z = 1",
        b"dash",
        b"# a",
        b"x",
        b"y",
        b"deep",
    ]
    names = [Path(s.name).name for s in sources.list_source(str(folder)).shards]
    assert names[:3] == ["a.txt", "empty.txt", "image.png"]


def test_tree_is_one_document_with_a_line_before_each_file(folder: Path) -> None:
    (folder / "data.jsonl.gz").write_bytes(b"passed over, whatever it holds")
    assert documents(f"tree:{folder}") == [
        b"==> a.txt <==\nfirst\n"
        b"==> empty.txt <==\n \n"
        b"==> latin.txt <==\ncaf\xe9\n"
        b"==> z.py <==\nz = 1\n"
        b"==> a-b/x.txt <==\ndash\n"
        b"==> b/a.md <==\n# a\n"
        b'==> b/lines.jsonl <==\n{"text": "x"}\n{"text": "y"}\n'
        b"==> b/c/deep.txt <==\ndeep\n"
    ]
    (listed,) = sources.list_source(f"tree:{folder}").shards
    assert listed.size >= sum(map(len, FILES.values())) - 3 * len(b"hidden")


def test_text_without_permission_is_left_out(folder: Path, monkeypatch) -> None:
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda name, mode: "a.txt" not in name and access(name, mode)
    )
    assert documents(folder)[0] == b""
    assert b"first" not in documents(f"tree:{folder}")[0]


def test_home_is_expanded(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert documents("~/a.txt") == [b"first\n"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/nowhere.txt", r"does not exist; set --config\.data\.sources"),
        ("tree:{}/nowhere", "does not exist"),
        ("tree:{}/a.txt", "is not a directory"),
        ("/dev/null", "is not a file or directory"),
    ],
)
def test_nothing_to_read(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources.list_source(name.format(folder))


def test_identity_changes_with_any_file(folder: Path) -> None:
    for name in (str(folder), f"tree:{folder}"):
        before = sources.identities(sources.list_source(name).shards)[-1]
        assert before == sources.identities(sources.list_source(name).shards)[-1]
        file = folder / "b/c/deep.txt"
        time = file.stat().st_mtime_ns
        file.write_bytes(b"DEEP")
        os.utime(file, ns=(time, time + 1))
        assert before != sources.identities(sources.list_source(name).shards)[-1]


@pytest.fixture
def remote(monkeypatch) -> MemoryFileSystem:
    """s3:// and gs:// in memory."""

    class Remote(MemoryFileSystem):
        protocol = ("s3", "gs")
        store: ClassVar[dict] = {}
        pseudo_dirs: ClassVar[list] = [""]

    monkeypatch.setattr(
        backend.fsspec_backend, "_get_filesystem", lambda name: Remote()
    )
    return Remote()


def test_remote_paths_are_opened_by_epath(remote, folder: Path) -> None:
    for name, text in FILES.items():
        remote.pipe(f"s3://bucket/text/{name}", text)
    assert documents("s3://bucket/text") == documents(folder)
    assert documents("tree:s3://bucket/text") == documents(f"tree:{folder}")
    assert documents("s3://bucket/text/b/lines.jsonl") == [b"x", b"y"]
    with pytest.raises(UserError, match="does not exist"):
        sources.list_source("s3://bucket/none")


def test_remote_array_record_is_copied_first(remote, tmp_path: Path) -> None:
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    writer.write(b"text")
    writer.close()
    content = (tmp_path / "a.array_record").read_bytes()
    remote.pipe("gs://bucket/a.array_record", content)
    assert documents("gs://bucket/a.array_record") == [b"text"]
