"""Arrays of a native checkpoint one by one, outside of orbax.

orbax writes a tree that is in memory. A conversion has one array of it at a time, so
it writes the same files itself: uncompressed Zarr, an expert a chunk, and the list of
arrays that orbax reads. Reading takes any checkpoint of ours, by tensorstore, which is
what orbax reads with.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorstore as ts

from kimi_jax.interop.entries import InteropError, Shape

_METADATA = "_METADATA"
_DICTIONARY_KEY = 2  # orbax's number for a key of a dictionary


def declare(
    state: pathlib.Path, name: str, shape: Shape, dtype: Any, chunk: Shape
) -> None:
    """Make the folder of an array, with everything but its chunks."""
    folder = state / _file_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": _zarr_dtype(np.dtype(dtype)),
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
    (folder / ".zarray").write_text(json.dumps(about))


def chunk_file(state: pathlib.Path, name: str, number: int, rank: int) -> pathlib.Path:
    """Where the `number`-th chunk along the first axis lies: bytes, nothing else."""
    at = [str(number), *["0"] * (rank - 1)][: max(rank, 1)]
    return state / _file_name(name) / ".".join(at)


def write_metadata(state: pathlib.Path, names: Iterable[str]) -> None:
    """The list of arrays, as orbax writes it."""
    tree = {}
    for name in names:
        keys = tuple(name.split("/"))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICTIONARY_KEY} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    about = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (state / _METADATA).write_text(json.dumps(about))


class Arrays:
    """The arrays in the `state` folder of a checkpoint, by canonical name."""

    def __init__(self, state: pathlib.Path):
        self._state = state
        try:
            about = json.loads((state / _METADATA).read_bytes())
            tree, self._ocdbt = about["tree_metadata"], about["use_ocdbt"]
            self._driver = "zarr3" if about.get("use_zarr3") else "zarr"
        except (OSError, ValueError, KeyError) as error:
            raise InteropError(
                f"{state / _METADATA} cannot be read: {error!r}"
            ) from error
        self.names = [
            "/".join(str(key["key"]) for key in value["key_metadata"])
            for value in tree.values()
        ]
        self._open: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """The array, unread: a TensorStore with `shape` and `dtype`."""
        if name not in self._open:
            path = f"{_file_name(name)}/"
            store: dict[str, Any] = {"driver": "file", "path": f"{self._state}/{path}"}
            if self._ocdbt:
                base = f"file://{self._state}/"
                store = {"driver": "ocdbt", "base": base, "path": path}
            spec = {"driver": self._driver, "kvstore": store}
            try:
                self._open[name] = ts.open(spec, open=True, read=True).result()
            except ValueError as error:
                raise InteropError(f"{self._state}: {name}: {error}") from error
        return self._open[name]

    def rows(self, name: str) -> int:
        """How many rows of the first axis are read best at a time."""
        return self.open(name).chunk_layout.read_chunk.shape[0]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the first axis."""
        return self.open(name)[start:stop].read(order="C").result()

    def read_all(self, name: str) -> np.ndarray:
        return np.asarray(self.open(name).read(order="C").result())


def starts(length: int, rows: int) -> Iterable[tuple[int, int]]:
    """(start, stop) of pieces of `rows` that cover `length`."""
    edges = [*range(0, length, rows), length]
    return itertools.pairwise(edges)


def _file_name(name: str) -> str:
    return name.replace("/", ".")


def _zarr_dtype(dtype: np.dtype) -> str:
    # Zarr has no word for it; this one is tensorstore's.
    return "bfloat16" if dtype.name == "bfloat16" else dtype.str
