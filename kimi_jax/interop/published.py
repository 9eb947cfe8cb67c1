"""A published checkpoint folder, matched against the table of names."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kimi_jax.interop import hf_config, mxfp4, names, vision_names
from kimi_jax.interop import safetensors_files as st
from kimi_jax.interop.entries import Entry, InteropError

_SHOWN = 10


class Published(NamedTuple):
    """What a folder holds, under our names.

    arrays: {our name: entry}, in the order of the forward pass. An array of experts
      that is packed is there as its codes and scales (`names.packed`).
    """

    folder: pathlib.Path
    release: hf_config.Release
    arrays: dict[str, Entry]
    tensors: dict[str, st.Tensor]

    def dtype(self, entry: Entry) -> np.dtype:
        return self.tensors[entry.published[0]].dtype

    def read(self, entry: Entry, which: int = 0) -> np.ndarray:
        """What the `which`-th of an entry's tensors becomes: [*entry.cell]."""
        return entry.to_ours(st.read(self.tensors[entry.published[which]]))


def open_published(folder: str | os.PathLike[str]) -> Published:
    """Read config.json and every header, and match them.

    Raises:
      InteropError: either is unreadable, or tensors are missing, left over, or of
        another shape or dtype than the config says; all of them are listed.
    """
    folder = pathlib.Path(folder).absolute()
    release = hf_config.read(folder)
    tensors = st.open_folder(folder)
    arrays: dict[str, Entry] = {}
    for entry in table(release):
        both = names.packed(entry) if _is_packed(entry, tensors) else (entry,)
        arrays |= {found.name: found for found in both}
    problems = _mismatches(arrays, tensors) + _contradictions(release, arrays)
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(f"... and {len(problems) - _SHOWN} more")
        raise InteropError(
            f"{folder}: the tensors are not those of its {hf_config.CONFIG}:\n  "
            + "\n  ".join(shown)
        )
    return Published(folder, release, arrays, tensors)


def table(release: hf_config.Release) -> list[Entry]:
    """Every array of a release, unpacked."""
    model = release.model
    entries = names.text_entries(model, release.prefix)
    if model.vision is not None:
        entries += vision_names.vision_entries(model.vision, model.width)
    return entries


def dequantise(
    entry: Entry, codes: np.ndarray, scales: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """The cell of one expert of the unpacked `entry`: [*entry.cell]."""
    return entry.to_ours(mxfp4.unpack(codes, scales, dtype))


def _is_packed(entry: Entry, tensors: Mapping[str, st.Tensor]) -> bool:
    return names.can_pack(entry) and any(
        f"{name}_packed" in tensors for name in entry.published
    )


def _mismatches(
    arrays: Mapping[str, Entry], tensors: Mapping[str, st.Tensor]
) -> list[str]:
    problems, used = [], set()
    for entry in arrays.values():
        kinds = {tensors[n].dtype for n in entry.published if n in tensors}
        if len(kinds) > 1:
            problems.append(f"{entry.published[0]}: its experts differ in dtype")
        for name in entry.published:
            used.add(name)
            if name not in tensors:
                problems.append(f"{name} {list(entry.stored)}: missing")
            elif tensors[name].shape != entry.stored:
                problems.append(
                    f"{name}: shape {list(tensors[name].shape)}, the config says "
                    f"{list(entry.stored)}"
                )
            elif _wrong_kind(entry, tensors[name].dtype):
                problems.append(
                    f"{name}: dtype {tensors[name].dtype} is not a weight's"
                )
    problems += [f"{n}: in no table of names" for n in tensors if n not in used]
    return problems


def _wrong_kind(entry: Entry, dtype: np.dtype) -> bool:
    return (dtype == np.uint8) != entry.name.startswith(names.PACKED)


def _contradictions(
    release: hf_config.Release, arrays: Mapping[str, Entry]
) -> list[str]:
    found = any(name.startswith(names.PACKED) for name in arrays)
    if found == release.packed:
        return []
    if found:
        return ["experts are packed, but config.json has no quantization_config"]
    return ["config.json has a quantization_config, but no expert is packed"]
