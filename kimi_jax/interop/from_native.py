"""From a native checkpoint to a published folder, a tensor at a time.

What was converted from a release goes back byte for byte: the same names, shapes,
dtypes, files and config. What was trained here is published in the releases' layout,
of Kimi-Linear's or of K3's text model, as its config has it.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kimi_jax import config_io
from kimi_jax.interop import hf_config, names, native
from kimi_jax.interop import safetensors_files as st
from kimi_jax.interop.entries import Entry, InteropError
from kimi_jax.interop.published import table
from kimi_jax.interop.staging import Job, Progress, Staging
from kimi_jax.interop.to_native import PUBLISHED, array_bytes, file_sum
from kimi_jax.train import checkpoint_files as files

DTYPES = ("stored", "release")
FILE_BYTES = 5 * 10**9


class _Plan(NamedTuple):
    """What is written: where each published tensor comes from, and goes."""

    arrays: native.Arrays
    sources: dict[str, tuple[Entry, int]]  # published name: entry, which of its own
    dtypes: dict[str, np.dtype]  # by entry name
    places: dict[str, str]  # published name: file name


def from_native(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int,
    dtype: str = "stored",
    show: Callable[[Progress], None] = lambda _: None,
) -> int:
    """Publish the checkpoint `source` as `target`; returns the bytes of tensors.

    Args:
      source: a workdir, for its newest checkpoint, or one folder `checkpoints/STEP`.
      target: must not exist yet. The same call goes on after a kill.
      dtype: "stored" keeps each array's; "release" is bfloat16, and float32 for the
        few arrays that the releases keep in it. Packed arrays stay packed.
      workers: threads; each holds one tensor at a time, and its transpose.

    Raises:
      InteropError: the checkpoint is no model that the published code can express.
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = files.find(source)
    about = files.read_about(folder)
    release = describe(about)
    others = folder.parent.parent / PUBLISHED
    plan = _plan(folder, release, others, dtype)
    identity = {"from": str(folder), "parameters": about["parameters"], "dtype": dtype}
    if damage := files.find_damage(folder):
        raise files.damaged(folder, damage)
    with Staging(target, identity) as staging:
        jobs = list(_jobs(plan, staging.part))
        staging.run(jobs, workers=workers, show=show)
        total = sum(job.bytes for job in jobs)
        _write_others(release, others, plan, staging.part, total)
        staging.publish()
    return total


def describe(about: Mapping[str, Any]) -> hf_config.Release:
    """The release that a checkpoint came from, or would be.

    Args:
      about: `checkpoint_files.read_about`.
    """
    model = config_io.model_from_dict(about["config"]["model"])
    if "published" in about:
        return hf_config.parse(about["published"])
    return hf_config.parse(hf_config.publish(model))


def _plan(
    folder: pathlib.Path, release: hf_config.Release, others: pathlib.Path, dtype: str
) -> _Plan:
    arrays = native.Arrays(folder / files.STATE)
    stored, sources, dtypes = set(arrays.names), {}, {}
    problems = []
    for entry in table(release):
        both = names.packed(entry) if names.can_pack(entry) else ()
        for found in both if both and both[0].name in stored else (entry,):
            if found.name not in stored:
                problems.append(f"{found.name}: missing")
                continue
            shape = arrays.open(found.name).shape
            if shape != found.shape:
                problems.append(f"{found.name}: {shape}, the table says {found.shape}")
            dtypes[found.name] = _dtype(arrays, found, dtype)
            sources |= {name: (found, n) for n, name in enumerate(found.published)}
            stored.discard(found.name)
    collections = ("params/", "balance/", f"{names.PACKED}/")
    problems += [
        f"{n}: in no table of names" for n in stored if n.startswith(collections)
    ]
    if problems:
        raise InteropError(
            f"{folder} cannot be published:\n  " + "\n  ".join(sorted(problems)[:10])
        )
    sizes = {
        name: int(np.prod(entry.stored)) * dtypes[entry.name].itemsize
        for name, (entry, _) in sources.items()
    }
    return _Plan(arrays, sources, dtypes, _places(sizes, others))


def _dtype(arrays: native.Arrays, entry: Entry, dtype: str) -> np.dtype:
    stored = np.dtype(arrays.open(entry.name).dtype.numpy_dtype)
    if dtype == "stored" or stored == np.uint8:
        return stored
    return np.dtype(np.float32 if entry.precise else ml_dtypes.bfloat16)


def _places(sizes: Mapping[str, int], others: pathlib.Path) -> dict[str, str]:
    """{published name: file}: as the release had it, or files of FILE_BYTES."""
    if (others / st.INDEX).is_file():
        places = json.loads((others / st.INDEX).read_bytes())["weight_map"]
        if set(places) == set(sizes):
            return places
    numbers, room = {}, 0
    for name, size in sizes.items():
        if not numbers or size > room:
            number, room = len(set(numbers.values())) + 1, FILE_BYTES
        room -= size
        numbers[name] = number
    if len(set(numbers.values())) <= 1:
        return dict.fromkeys(sizes, st.SINGLE)
    last = max(numbers.values())
    return {
        name: f"model-{number:05d}-of-{last:05d}.safetensors"
        for name, number in numbers.items()
    }


def _jobs(plan: _Plan, part: pathlib.Path) -> Iterator[Job]:
    by_file: dict[str, list[str]] = {}
    for name, file in plan.places.items():
        by_file.setdefault(file, []).append(name)
    for file, inside in by_file.items():
        wanted = [
            (name, plan.dtypes[entry.name], entry.stored)
            for name in inside
            for entry, _ in [plan.sources[name]]
        ]
        made = st.lay_out(part / file, wanted)
        for tensor in sorted(made.values(), key=lambda tensor: tensor.offset):

            def write(tensor: st.Tensor = tensor) -> int:
                values = _read(plan, tensor.name).astype(tensor.dtype, copy=False)
                st.write(tensor, values)
                return zlib.crc32(array_bytes(values))

            def check(tensor: st.Tensor = tensor) -> int:
                return file_sum(tensor.file, tensor.offset, tensor.bytes)

            yield Job(tensor.name, tensor.bytes, write, check)


def _read(plan: _Plan, name: str) -> np.ndarray:
    entry, number = plan.sources[name]
    if entry.stacked:
        return entry.to_published(plan.arrays.read(entry.name, number, number + 1)[0])
    return entry.to_published(plan.arrays.read_all(entry.name))


def _write_others(
    release: hf_config.Release,
    others: pathlib.Path,
    plan: _Plan,
    part: pathlib.Path,
    total: int,
) -> None:
    """The config, the index, and what else the release had."""
    if others.is_dir():
        for file in others.iterdir():
            shutil.copy(file, part / file.name)
    if not (part / hf_config.CONFIG).exists():
        text = json.dumps(release.published, indent=2) + "\n"
        (part / hf_config.CONFIG).write_text(text)
    if set(plan.places.values()) != {st.SINGLE} and not (part / st.INDEX).exists():
        (part / st.INDEX).write_text(st.index_text(plan.places, total))
