"""Checkpoints, native or published, as arrays that are read by canonical name."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import jax
import ml_dtypes
import numpy as np

from kimi_jax import config, config_io, distributed
from kimi_jax.interop import hf_config, names, native
from kimi_jax.interop.entries import Entry, Shape
from kimi_jax.interop.published import Published, dequantise, open_published, table
from kimi_jax.train import checkpoint_files as files

_READ_SECONDS = 3600


class Source(Protocol):
    """A checkpoint; arrays are read a few rows of their first axis at a time.

    where: its folder.
    model: what it says that it is.
    arrays: shapes and dtypes by canonical name, "params/..." and "balance/...".
    """

    where: str
    model: config.Model
    arrays: Mapping[str, jax.ShapeDtypeStruct]

    def rows(self, name: str) -> int:
        """How many rows are best read at a time."""
        raise NotImplementedError

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop; both are multiples of `rows`, or the end. Scalars whole."""
        raise NotImplementedError


def open_source(path: str | os.PathLike[str], *, verify: bool = True) -> Source:
    """The checkpoint in `path`, unread but for its headers.

    Args:
      path: a published folder, a workdir, or one of its folders checkpoints/STEP.
      verify: compare the files of a native checkpoint with their sums. Published
        folders carry none.

    Raises:
      InteropError, CheckpointError: there is none, or it is damaged.
    """
    if is_published(path):
        return _PublishedSource(open_published(path))
    folder = files.find(path)
    problem = None
    if verify:
        problem = distributed.on_leader(
            "sums of the checkpoint",
            lambda: files.find_damage(folder),
            timeout=_READ_SECONDS,
        )
    if problem:
        raise files.damaged(folder, problem)
    return _NativeSource(folder)


def is_published(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a published folder rather than one of ours.

    A workdir has a config.json as well, but its fields are in sections.
    """
    folder = pathlib.Path(path)
    file = folder / hf_config.CONFIG
    try:
        fields = json.loads(file.read_bytes())
    except (OSError, ValueError):
        fields = None
    if isinstance(fields, dict) and "model_type" in fields:
        return True
    return any(folder.glob("*.safetensors"))  # and its config.json is damaged


class _PublishedSource:
    def __init__(self, published: Published):
        self._published = published
        self.where = str(published.folder)
        self.model = published.release.model
        self._entries = {entry.name: entry for entry in table(published.release)}
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(entry.shape, self._dtype(entry))
            for name, entry in self._entries.items()
        }

    def _dtype(self, entry: Entry) -> np.dtype:
        if entry.name in self._published.arrays:
            return self._published.dtype(entry)
        return np.dtype(ml_dtypes.bfloat16)

    def rows(self, name: str) -> int:
        entry = self._entries[name]
        return 1 if entry.stacked else entry.shape[0]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        entry = self._entries[name]
        if not entry.stacked:
            return self._published.read(entry)
        if name in self._published.arrays:
            return self._published.read(entry, start)[None]
        parts = [self._published.arrays[part.name] for part in names.packed(entry)]
        codes, scales = (self._published.read(part, start) for part in parts)
        return dequantise(entry, codes, scales, self.arrays[name].dtype)[None]


class _NativeSource:
    def __init__(self, folder: pathlib.Path):
        about = files.read_about(folder)
        self.where = str(folder)
        self.model = config_io.model_from_dict(about["config"]["model"])
        self._native = native.Arrays(folder / files.STATE)
        self._packed: dict[str, Entry] = {}
        stored = set(self._native.names)
        for entry in names.text_entries(self.model) if _has_packed(stored) else ():
            if names.can_pack(entry) and names.packed(entry)[0].name in stored:
                self._packed[entry.name] = entry
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(*self._about(name))
            for name in [*self._native.names, *self._packed]
            if name.startswith(("params/", "balance/"))
        }

    def _about(self, name: str) -> tuple[Shape, np.dtype]:
        if name in self._packed:
            return self._packed[name].shape, np.dtype(ml_dtypes.bfloat16)
        store = self._native.open(name)
        return store.shape, store.dtype.numpy_dtype

    def rows(self, name: str) -> int:
        return 1 if name in self._packed else self._native.rows(name)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        if not self.arrays[name].shape:
            return self._native.read_all(name)
        if name not in self._packed:
            return self._native.read(name, start, stop)
        entry = self._packed[name]
        parts = [part.name for part in names.packed(entry)]
        codes, scales = (self._native.read(part, start, stop)[0] for part in parts)
        return dequantise(entry, codes, scales, self.arrays[name].dtype)[None]


def _has_packed(stored: Iterable[str]) -> bool:
    return any(name.startswith(f"{names.PACKED}/") for name in stored)
