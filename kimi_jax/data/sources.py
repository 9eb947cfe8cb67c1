"""From what a user names to shards of documents.

    ""            the default corpus (`shakespeare`)
    PATH          a file, read by its suffix (`formats`), or a directory: each text file
                  one document, each .jsonl, .parquet or .array_record file as by itself
    tree:PATH     a directory as one long document, e.g. a repository

PATH may be anything that `etils.epath` opens: a local path, gs://, s3://. A directory
is read with everything below it; in each folder the files come first, then the folders,
either by name, and names that start with a dot are passed over. In a tree, a line
`==> relative/path <==` precedes each file, and packed formats are passed over. Binary
files and text files without permission to read are left out; in a directory, unlike in
a tree, each counts as an empty document.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from etils import epath

from kimi_jax.data import formats, shakespeare
from kimi_jax.data.formats import Advance, Document
from kimi_jax.errors import UserError

TREE = "tree:"

_PLAIN = (("text", ""), ("jsonl", ""))  # what a tree shows as it stands


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a source that is read from its start to its end: mostly a file."""

    name: str
    size: int  # bytes of input
    stamp: str  # another one if the contents may have changed
    read: Callable[[Advance], Iterator[Document]] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Source:
    """What `name` stands for."""

    name: str  # as given
    title: str  # for people
    shards: Sequence[Shard]


def list_source(name: str) -> Source:
    """The shards of the source `name`; see the module. Reads no text yet.

    Raises:
      UserError: nothing is there, or it is neither a file nor a directory.
    """
    if not name:
        shard = Shard("shakespeare", 0, shakespeare.PLAYS_SHA256, _scenes)
        return Source(name, shakespeare.TITLE, [shard])
    tree = name.startswith(TREE)
    path = epath.Path(name.removeprefix(TREE)).expanduser()
    if path.is_dir():
        files = list(_walk(path))
        if tree:
            shards = [_tree_shard(path, files)]
        else:
            shards = [_file_shard(file, _read_member) for file in files]
    elif _is_file(path) and not tree:
        shards = [_file_shard(path, formats.read_documents)]
    else:
        raise UserError(_nothing(name, path, tree))
    return Source(name, name, shards)


def identities(shards: Iterable[Shard]) -> list[str]:
    """For each n, a digest of the first n shards: equal if these are unchanged.

    Names, sizes and stamps count; the contents are not read.
    """
    digest = hashlib.sha256()
    found = [digest.hexdigest()]
    for shard in shards:
        digest.update(f"{shard.name}\n{shard.size}\n{shard.stamp}\n".encode())
        found.append(digest.hexdigest())
    return found


def _nothing(name: str, path: epath.Path, tree: bool) -> str:
    wanted = "a directory" if tree else "a file or directory"
    problem = f"is not {wanted}" if path.exists() else "does not exist"
    return (
        f"source {name!r} {problem}; set --config.data.sources to a text, .jsonl, "
        ".parquet or .array_record file, a directory, tree:DIRECTORY, the folder of a "
        "token store, or '' for the default corpus"
    )


def _scenes(advance: Advance) -> Iterator[Document]:
    for scene in shakespeare.scenes():
        yield (scene,)


def _walk(root: epath.Path) -> Iterator[epath.Path]:
    """Regular files below `root`, a folder's files before its subfolders."""
    found = []
    for folder, folders, names in root.walk():
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = folder.relative_to(root).parts
        if any(part.startswith(".") for part in inside):
            continue
        found += [(*inside, name) for name in names if not name.startswith(".")]
    for parts in sorted(found, key=lambda p: [*((1, x) for x in p[:-1]), (0, p[-1])]):
        file = root.joinpath(*parts)
        if _is_file(file):
            yield file


def _is_file(path: epath.Path) -> bool:
    """Whether `path` can be read to an end; a pipe or socket would block for ever."""
    name = os.fspath(path)
    return path.is_file() if "://" in name else os.path.isfile(name)


def _file_shard(
    file: epath.Path, read: Callable[[epath.Path, Advance], Iterator[Document]]
) -> Shard:
    return Shard(str(file), *_state(file), functools.partial(read, file))


def _state(file: epath.Path) -> tuple[int, str]:
    name = os.fspath(file)
    if "://" in name:
        stat = file.stat()
        return stat.length, str(stat.mtime)
    local = os.stat(name)
    return local.st_size, str(local.st_mtime_ns)


def _tree_shard(root: epath.Path, files: Sequence[epath.Path]) -> Shard:
    states = [_state(file) for file in files]
    digest = hashlib.sha256()
    for file, state in zip(files, states, strict=True):
        digest.update(f"{file.relative_to(root).as_posix()}\n{state}\n".encode())
    size = sum(size for size, _ in states)
    read = functools.partial(_read_tree, root, files)
    return Shard(str(root), size, digest.hexdigest(), read)


def _read_member(file: epath.Path, advance: Advance) -> Iterator[Document]:
    kind, compression = formats.kind_of(file.name)
    if kind != "text":
        yield from formats.read_documents(file, advance)
        return
    text = formats.read_text(file, compression, advance) if _may_read(file) else None
    yield text or ()


def _read_tree(
    root: epath.Path, files: Sequence[epath.Path], advance: Advance
) -> Iterator[Document]:
    def pieces() -> Iterator[bytes]:
        for file in files:
            if formats.kind_of(file.name) not in _PLAIN or not _may_read(file):
                continue
            text = formats.read_text(file, "", advance)
            if text is None:
                continue
            yield f"==> {file.relative_to(root).as_posix()} <==\n".encode()
            last = b"\n"
            for piece in text:
                yield piece
                last = piece or last
            if not last.endswith(b"\n"):
                yield b"\n"

    yield pieces()


def _may_read(file: epath.Path) -> bool:
    name = os.fspath(file)
    return "://" in name or os.access(name, os.R_OK)
