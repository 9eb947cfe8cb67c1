"""From a published folder to a native checkpoint, a tensor at a time.

    DIR/checkpoints/0/state/     as the trainer writes it, to `train.checkpoint`
    DIR/published/               config, tokenizer and code of the release, as they were

Arrays keep the dtype they were published in. Packed experts stay packed, byte for byte,
under `packed/` with the name of the array they stand for: at K3's size unpacking would
make 1.5 TB into 5.5, and could not be undone exactly (`kimi_jax.interop.mxfp4`).
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from kimi_jax import canonical, config_io
from kimi_jax.interop import native
from kimi_jax.interop.entries import Entry
from kimi_jax.interop.published import Published, open_published
from kimi_jax.interop.staging import Job, Progress, Staging
from kimi_jax.train import checkpoint_files as files

PUBLISHED = "published"  # folder of what is not a tensor
# What a published folder holds besides tensors, and we keep.
_KEPT = {".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt", ""}
_READ_BYTES = 1 << 22


def to_native(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int,
    show: Callable[[Progress], None] = lambda _: None,
) -> int:
    """Convert the published folder `source` to `target`; returns the bytes written.

    Args:
      target: becomes a workdir with the checkpoint of step 0; must not exist yet. The
        same call goes on after a kill.
      workers: threads; each holds one tensor at a time, and its transpose.

    Raises:
      InteropError: the source is not whole, or not a model of ours; the target exists.
    """
    published = open_published(source)
    with Staging(target, _identity(published)) as staging:
        state = staging.part / files.FOLDER / "0" / files.STATE
        for entry in published.arrays.values():
            chunk = (1, *entry.cell) if entry.stacked else entry.shape
            dtype = published.dtype(entry)
            native.declare(state, entry.name, entry.shape, dtype, chunk)
        jobs = list(_jobs(published, staging.part))
        staging.run(jobs, workers=workers, show=show)
        native.write_metadata(state, published.arrays)
        _write_about(published, state)
        sums = {staging.part / key: sums for key, sums in staging.finished.items()}
        _write_sums(state, sums)
        _keep_others(published.folder, staging.part / PUBLISHED)
        staging.publish()
    return sum(job.bytes for job in jobs)


def file_sum(file: pathlib.Path, offset: int = 0, size: int | None = None) -> int:
    """CRC-32 of `size` bytes of a file, or of all."""
    checksum, left = 0, size
    with open(file, "rb", buffering=0) as stream:
        stream.seek(offset)
        while left != 0:
            block = stream.read(_READ_BYTES if left is None else min(_READ_BYTES, left))
            if not block:
                break
            checksum = zlib.crc32(block, checksum)
            left = None if left is None else left - len(block)
    return checksum


def array_bytes(values: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order, as uint8 [n]; a view if it is in that order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _identity(published: Published) -> dict[str, Any]:
    """Of a source: a file that changes meanwhile must not be continued."""
    paths = sorted({tensor.file for tensor in published.tensors.values()})
    stats = [path.stat() for path in paths]
    return {
        "from": str(published.folder),
        "config": published.release.published,
        "files": [
            [path.name, stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(paths, stats, strict=True)
        ],
    }


def _jobs(published: Published, part: pathlib.Path) -> Iterator[Job]:
    """One for each tensor, in the order in which they lie in their files."""
    state = part / files.FOLDER / "0" / files.STATE
    pieces = [
        (entry, number)
        for entry in published.arrays.values()
        for number in range(len(entry.published))
    ]
    tensors = published.tensors
    pieces.sort(key=lambda piece: tensors[piece[0].published[piece[1]]][1::3])
    for entry, number in pieces:
        file = native.chunk_file(state, entry.name, number, len(entry.shape))
        size = int(np.prod(entry.cell)) * published.dtype(entry).itemsize

        def write(entry: Entry = entry, number: int = number, file=file) -> int:
            data = array_bytes(published.read(entry, number))
            with open(file, "wb", buffering=0) as stream:
                stream.write(data)
            return zlib.crc32(data)

        def check(file: pathlib.Path = file) -> int:
            return file_sum(file)

        yield Job(str(file.relative_to(part)), size, write, check)


def _write_about(published: Published, state: pathlib.Path) -> None:
    params = {
        entry.name: jax.ShapeDtypeStruct(entry.shape, published.dtype(entry))
        for entry in published.arrays.values()
        if entry.name.startswith("params/")
    }
    about = {
        "config": {"model": config_io.to_dict(published.release.model)},
        "versions": files.versions(),
        "data": {},
        "parameters": canonical.fingerprint(params),
        "published": published.release.published,
    }
    (state / files.ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def _write_sums(
    state: pathlib.Path, known: dict[pathlib.Path, tuple[int, int]]
) -> None:
    sums = {}
    for file in sorted(state.rglob("*")):
        if file.is_file() and file.name != files.FILES:
            size, checksum = known.get(file) or (file.stat().st_size, file_sum(file))
            sums[str(file.relative_to(state))] = [size, checksum]
    (state / files.FILES).write_text(json.dumps(sums, indent=2) + "\n")


def _keep_others(source: pathlib.Path, target: pathlib.Path) -> None:
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in _KEPT and not file.name.startswith("."):
            shutil.copy(file, target / file.name)
