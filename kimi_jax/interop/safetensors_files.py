"""safetensors folders, read and written a tensor at a time.

The `safetensors` package maps whole files and writes them from memory, and its errors
do not name the tensor. A file of the format is eight bytes of length, a JSON header,
and the tensors' bytes: few enough lines to read by offset, from many threads, and to
name what is wrong. Tests read what this writes with the package, and the reverse.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kimi_jax.interop.entries import InteropError, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "I8": np.int8,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit


class Tensor(NamedTuple):
    """Where a tensor's bytes are."""

    name: str
    file: pathlib.Path
    dtype: np.dtype
    shape: Shape
    offset: int  # in the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_folder(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """{name: tensor} of all safetensors files of a published checkpoint.

    Raises:
      InteropError: no file, one that is missing, damaged or holds a dtype that no
        release uses, or a name that stands for two tensors.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise InteropError(f"{folder}: no such folder")
    places = _weight_map(folder)
    if places is None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InteropError(f"{folder} holds no *.safetensors file")
    else:
        files = sorted({folder / name for name in places.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InteropError(
                f"{folder}: {INDEX} names {len(missing)} of {len(files)} files that "
                f"are not there: {', '.join(missing[:5])}; copy them too"
            )
    found: dict[str, Tensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in found:
                raise InteropError(
                    f"{tensor.name} is in {found[tensor.name].file.name} and again in "
                    f"{file.name}; remove the file that does not belong to the folder"
                )
            found[tensor.name] = tensor
    if places is not None:
        _check_index(folder, places, found)
    return found


def read_header(file: pathlib.Path) -> list[Tensor]:
    """The tensors of one file, by offset.

    Raises:
      InteropError: see `open_folder`.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise InteropError(f"{file} is no safetensors file, or is cut short")
        header = stream.read(length)
    try:
        pairs = json.loads(header, object_pairs_hook=lambda pairs: pairs)
    except ValueError as error:
        raise InteropError(f"{file}: its header is damaged: {error}") from error
    if not isinstance(pairs, list) or not all(isinstance(p, tuple) for p in pairs):
        raise InteropError(f"{file}: its header is no list of tensors")
    tensors = []
    seen: set[str] = set()
    for name, about in pairs:
        if name in seen:
            raise InteropError(f"{file}: two tensors have the name {name}")
        seen.add(name)
        if name != "__metadata__":
            tensors.append(_tensor(file, name, about, 8 + length, size))
    return sorted(tensors, key=lambda tensor: tensor.offset)


def read(tensor: Tensor) -> np.ndarray:
    """The whole tensor."""
    values = np.empty(tensor.shape, tensor.dtype)
    view, done = memoryview(values.reshape(-1).view(np.uint8)), 0
    with open(tensor.file, "rb", buffering=0) as stream:
        while done < tensor.bytes:
            count = os.preadv(stream.fileno(), [view[done:]], tensor.offset + done)
            if not count:
                raise InteropError(f"{tensor.file}: {tensor.name} is cut short")
            done += count
    return values


def lay_out(
    file: pathlib.Path, tensors: Iterable[tuple[str, Any, Shape]]
) -> dict[str, Tensor]:
    """Make `file` with a header and room for `tensors`, (name, dtype, shape) each.

    Wide dtypes come first, as in the files of the package, so that all are aligned.
    """
    ordered = sorted(tensors, key=lambda t: (-np.dtype(t[1]).itemsize, t[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    made, end = [], 0
    for name, kind, shape in ordered:
        tensor = Tensor(name, file, np.dtype(kind), tuple(shape), end)
        end += tensor.bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(shape),
            "data_offsets": [tensor.offset, end],
        }
        made.append(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    # A file that is there already keeps the tensors it has.
    with open(file, "ab"), open(file, "r+b") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(start + end)
    return {t.name: t._replace(offset=t.offset + start) for t in made}


def write(tensor: Tensor, values: np.ndarray) -> None:
    """Put the bytes of a tensor where `lay_out` made room for them."""
    if values.dtype != tensor.dtype or values.shape != tensor.shape:
        raise ValueError(
            f"{tensor.name}: {values.dtype} {values.shape} where room was made for "
            f"{tensor.dtype} {tensor.shape}"
        )
    data = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    with open(tensor.file, "r+b", buffering=0) as stream:
        done = 0
        while done < len(data):
            done += os.pwrite(stream.fileno(), data[done:], tensor.offset + done)


def index_text(files: Mapping[str, str], total: int) -> str:
    """The index file of {tensor: file name} with `total` bytes of tensors."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(files)}
    return json.dumps(index, indent=2) + "\n"


def _weight_map(folder: pathlib.Path) -> dict[str, str] | None:
    file = folder / INDEX
    if not file.is_file():
        return None
    try:
        places = dict(json.loads(file.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise InteropError(f"{file} has no weight_map: {error!r}") from error
    odd = [name for name in places.values() if os.path.basename(str(name)) != name]
    if odd:
        raise InteropError(f"{file}: {odd[0]!r} is not a file name")
    return places


def _check_index(
    folder: pathlib.Path, places: Mapping[str, str], found: Mapping[str, Tensor]
) -> None:
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise InteropError(
                f"{folder}: {INDEX} says that {name} is in {file}, but it is not; the "
                "index and the files are of different checkpoints"
            )
    extra = next(
        (tensor for tensor in found.values() if tensor.name not in places), None
    )
    if extra is not None:
        raise InteropError(
            f"{folder}: {extra.file.name} holds {extra.name}, which {INDEX} does not "
            "name; the index and the files are of different checkpoints"
        )


def _tensor(file: pathlib.Path, name: str, pairs: Any, start: int, size: int) -> Tensor:
    try:
        about = dict(pairs)
        kind = str(about["dtype"])
        begin, end = map(int, about["data_offsets"])
        shape = tuple(map(int, about["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InteropError(f"{file}: the header of {name} is damaged") from error
    if kind not in _DTYPES:
        raise InteropError(
            f"{file}: {name} has dtype {kind}; supported are {', '.join(_DTYPES)}"
        )
    tensor = Tensor(name, file, np.dtype(_DTYPES[kind]), shape, start + begin)
    if end - begin != tensor.bytes or begin < 0:
        raise InteropError(
            f"{file}: {name} has {end - begin} bytes, but {kind} {list(shape)} needs "
            f"{tensor.bytes}"
        )
    if start + end > size:
        raise InteropError(
            f"{file}: {name} is cut short, the file ends {start + end - size} bytes "
            "before it does; copy the file again"
        )
    return tensor
