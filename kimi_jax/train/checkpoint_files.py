"""One checkpoint on disk: where it lies, what is in it, whether it is whole.

    WORKDIR/checkpoints/200/state/   arrays under canonical names, written by orbax
                            .../about.json   config, versions, fingerprint, data
                            .../extra.bin    what else the run keeps, if anything
                            .../files.json   size and CRC-32 of every file

orbax renames a step's folder to its number when everything is in it, so the largest
number is the last durable step. The sums find what happens to files later, such as a
removal that was cut short; the arrays carry none of their own, and one flipped bit
would be read without a complaint.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from kimi_jax import distributed
from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import replace_file

FOLDER = "checkpoints"
STATE = "state"
ABOUT = "about.json"
FILES = "files.json"
EXTRA = "extra.bin"
_PACKAGES = ("kimi_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_READ_BYTES = 1 << 22
_READ_SECONDS = 3600

Arrays = dict[str, jax.ShapeDtypeStruct]


class CheckpointError(UserError):
    """A checkpoint cannot be written or read, or does not fit."""


def steps(workdir: str | os.PathLike[str]) -> list[int]:
    """The durable steps of a run, ascending. A running trainer may be at work there."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def find(path: str | os.PathLike[str]) -> pathlib.Path:
    """The folder of one checkpoint: `path` itself, or the newest of a workdir.

    Raises:
      CheckpointError: there is none.
    """
    folder = pathlib.Path(path).absolute()
    if folder.name.isdecimal() and folder.parent.name == FOLDER and folder.is_dir():
        return folder
    if found := steps(folder):
        return folder / FOLDER / str(found[-1])
    raise CheckpointError(
        f"{path} holds no checkpoint; pass the workdir of a run that has saved, or one "
        f"of its folders {FOLDER}/STEP"
    )


def versions() -> dict[str, str]:
    """Of the packages that could change what a resumed run computes."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """{"config", "versions", "parameters", "data"}, as they were at the save.

    Raises:
      CheckpointError: the file is missing or damaged.
    """
    try:
        return json.loads((folder / STATE / ABOUT).read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{STATE}/{ABOUT}: {error}") from error


def read_extra(folder: pathlib.Path) -> bytes:
    """What was saved beside the arrays, byte for byte.

    Raises:
      CheckpointError: there is nothing, or it is damaged.
    """
    state = folder / STATE
    try:
        size, checksum = json.loads((state / FILES).read_bytes())[EXTRA]
        extra = (state / EXTRA).read_bytes()
    except (OSError, ValueError, KeyError) as error:
        raise damaged(folder, f"{STATE}/{EXTRA} cannot be read: {error}") from error
    if (len(extra), zlib.crc32(extra)) != (size, checksum):
        raise damaged(folder, f"{STATE}/{EXTRA} has other contents than at the save")
    return extra


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Writes the arrays, then what is known about them, then the sums of the files.

    Without compression: it takes 8 % off float32 weights for three times the blocking
    and twice the processor time. orbax calls `finalize` in its background thread,
    before the folder gets its name.
    """

    def __init__(self) -> None:
        super().__init__(use_compression=False)
        self.about: Mapping[str, Any] = {}  # of the save that comes next
        self.extra = b""  # likewise
        self.bytes_written = 0
        self.finished = 0.0  # on the monotonic clock

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        folder = pathlib.Path(directory)
        replace_file(folder / ABOUT, json.dumps(self.about, indent=2) + "\n")
        if self.extra:
            replace_file(folder / EXTRA, self.extra)
        sums = {
            str(file.relative_to(folder)): list(_size_and_sum(file))
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        replace_file(folder / FILES, json.dumps(sums, indent=2) + "\n")
        self.bytes_written = sum(size for size, _ in sums.values())
        self.finished = time.monotonic()


def find_damage(folder: pathlib.Path) -> str | None:
    """The first file of a checkpoint that is not as it was written; reads them all."""
    state = folder / STATE
    try:
        sums = json.loads((state / FILES).read_bytes())
    except OSError:
        return f"{STATE}/{FILES} is missing"
    except ValueError:
        return f"{STATE}/{FILES} is damaged"
    for name, (size, checksum) in sums.items():
        file = state / name
        if not file.is_file():
            return f"{STATE}/{name} is missing"
        if file.stat().st_size != size:
            return f"{STATE}/{name} has {file.stat().st_size} of {size} bytes"
        if _size_and_sum(file)[1] != checksum:
            return f"{STATE}/{name} has other contents than when it was written"
    return None


def damaged(folder: pathlib.Path, what: str) -> CheckpointError:
    """The error of a damaged checkpoint, with the newest one that can replace it."""
    older = [s for s in steps(folder.parent.parent) if s < int(folder.name)]
    beside = [folder]
    fix = "no older one is intact: take the files from a backup, or start a new run"
    for step in reversed(older):
        candidate = folder.parent / str(step)
        if find_damage(candidate) is None:
            fix = (
                f"step {step} is intact: read {candidate} instead, or resume from it: "
                f"remove {', '.join(map(str, beside))} and run the same command"
            )
            break
        beside.append(candidate)
    return CheckpointError(f"checkpoint {folder} is damaged: {what}\n{fix}")


def read_arrays(folder: pathlib.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{canonical name: array} of `wanted`: a shape, dtype and sharding for each name.

    Dtype and sharding may be others than at the save.

    Raises:
      CheckpointError: a file is damaged.
    """
    problem = distributed.on_leader(
        "sums of the checkpoint", lambda: find_damage(folder), timeout=_READ_SECONDS
    )
    if problem:
        raise damaged(folder, problem)
    item = traverse_util.unflatten_dict(dict(wanted), sep="/")
    args = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    try:
        tree = ocp.PyTreeCheckpointHandler().restore(
            epath.Path(folder / STATE), args=args
        )
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read although its files are as they "
            f"were written: {error}\ncompare the versions in {STATE}/{ABOUT} with "
            "those that are installed"
        ) from error
    return traverse_util.flatten_dict(tree, sep="/")


def stored_arrays(folder: pathlib.Path) -> Arrays:
    """Shape and dtype of everything in a checkpoint, by canonical name.

    Raises:
      CheckpointError: the files that say so are damaged.
    """
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder / STATE)).tree
    except Exception as error:
        raise damaged(folder, f"{STATE}/_METADATA: {error}") from error
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def _size_and_sum(file: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(_READ_BYTES):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum
