"""Rollouts as plain values and arrays, and as the files of a folder.

FOLDER/rollouts.json       all but the arrays, and size and CRC-32 of every file
      /sequence_0000.npz   the arrays of one sequence
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kimi_jax.environments.environment import Task
from kimi_jax.errors import UserError
from kimi_jax.infer import snapshots
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.slots import Live
from kimi_jax.monitor.metrics import replace_file
from kimi_jax.rl.members import Group, Member
from kimi_jax.rl.trajectory import Trajectory, from_json

INDEX = "rollouts.json"
_TREES = ("states", "pages")  # of a saved sequence, arrays by name


class Part(NamedTuple):
    """A member without its environment."""

    trajectory: Trajectory
    sequence: Live
    start: int
    seconds: float


class Kept(NamedTuple):
    """What `unpack` finds."""

    queue: list[Group]
    groups: list[Group]
    members: list[Part]
    ended: list[Trajectory]


def pack(
    generator: Generator,
    values: Mapping[str, Any],
    queue: Sequence[Group],
    groups: Sequence[Group],
    members: Sequence[Member],
) -> dict[str, Any]:
    """`values`, what is to be done, and the sequences in slots."""
    roots = [group.root for group in groups if group.root is not None]
    live = [*roots, *(member.sequence for member in members)]
    return {
        **values,
        "sizes": _sizes(generator),
        "queue": [_group(group, live) for group in queue],
        "groups": [_group(group, live) for group in groups],
        "members": [
            {
                "trajectory": member.so_far().to_json(),
                "sequence": live.index(member.sequence),
                "seconds": member.seconds,
            }
            for member in members
        ],
        "sequences": snapshots.save_all(generator, live),
    }


def unpack(generator: Generator, state: Mapping[str, Any], max_tokens: int) -> Kept:
    """Undoes `pack`: the sequences are in slots again.

    Raises:
      UserError: the generator has other sizes, or the state is damaged.
    """
    sizes = _sizes(generator)
    if state["sizes"] != sizes:
        raise UserError(
            f"the rollouts were saved with {state['sizes']} and the generator has "
            f"{sizes}; make it with the same"
        )
    longest = max((len(s["tokens"]) for s in state["sequences"]), default=0)
    if longest >= max_tokens:
        raise UserError(
            f"max_tokens={max_tokens}, but a saved trajectory has {longest} tokens "
            "already; raise max_tokens"
        )
    rooms = [0] * len(state["sequences"])
    for member in state["members"]:
        tokens = len(state["sequences"][member["sequence"]]["tokens"])
        rooms[member["sequence"]] = max_tokens - tokens
    live = snapshots.load_all(generator, state["sequences"], rooms)
    return Kept(
        [_ungroup(values, live) for values in state["queue"]],
        [_ungroup(values, live) for values in state["groups"]],
        [_part(values, live) for values in state["members"]],
        [from_json(values) for values in state["ended"]],
    )


def write(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """`state` as files; `folder` is made.

    Raises:
      OSError: it holds rollouts already, or cannot be written.
    """
    where = pathlib.Path(folder)
    where.mkdir(parents=True)
    sequences, files = [], {}
    for number, saved in enumerate(state["sequences"]):
        name = f"sequence_{number:04d}.npz"
        data, dtypes = _to_npz(saved)
        replace_file(where / name, data)
        files[name] = [len(data), zlib.crc32(data)]
        left_out = (*_TREES, "routes")
        plain = {key: value for key, value in saved.items() if key not in left_out}
        sequences.append({**plain, "file": name, "dtypes": dtypes})
    index = json.dumps({**state, "sequences": sequences, "files": files})
    head = json.dumps({"bytes": len(index), "crc32": zlib.crc32(index.encode())})
    replace_file(where / INDEX, f"{head}\n{index}\n")


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write` was given.

    Raises:
      UserError: a file is missing or damaged.
    """
    where = pathlib.Path(folder)
    try:
        head, index = (where / INDEX).read_text().split("\n")[:2]
        known = json.loads(head)
        _check_sum(INDEX, index.encode(), (known["bytes"], known["crc32"]))
        state = json.loads(index)
        files = state.pop("files")
        sequences = []
        for saved in state["sequences"]:
            name, dtypes = saved.pop("file"), saved.pop("dtypes")
            data = (where / name).read_bytes()
            _check_sum(name, data, files[name])
            sequences.append({**saved, **_from_npz(data, dtypes)})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"the rollouts in {os.fspath(folder)} cannot be read ({error}); go on from "
            "an older checkpoint"
        ) from error
    return {**state, "sequences": sequences}


def _check_sum(name: str, data: bytes, known: Sequence[int]) -> None:
    if (len(data), zlib.crc32(data)) != tuple(known):
        raise ValueError(f"{name} is damaged")


def _to_npz(saved: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The arrays of a saved sequence, and the dtype of each."""
    arrays = {
        f"{tree}:{name}": array
        for tree in _TREES
        for name, array in saved[tree].items()
    }
    if saved["routes"] is not None:
        arrays["routes"] = saved["routes"]
    stream = io.BytesIO()
    savez: Callable[..., None] = np.savez
    # The format knows the dtypes of numpy alone, so all arrays go as bytes.
    savez(stream, **{name: _as_bytes(array) for name, array in arrays.items()})
    return stream.getvalue(), {name: x.dtype.name for name, x in arrays.items()}


def _from_npz(data: bytes, dtypes: Mapping[str, str]) -> dict[str, Any]:
    saved: dict[str, Any] = {"routes": None, **{tree: {} for tree in _TREES}}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name, dtype in dtypes.items():
            array = arrays[name].view(getattr(ml_dtypes, dtype, dtype))[..., 0]
            tree, _, path = name.partition(":")
            if tree == "routes":
                saved["routes"] = array
            else:
                saved[tree][path] = array
    return saved


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array)[..., None].view(np.uint8)


def _sizes(generator: Generator) -> dict[str, int]:
    """What has to agree for a sequence to go on exactly, beside the model."""
    pager = generator.pager
    return {
        "slots": generator.slots,
        "parts of the rows": pager.shard(generator.slots - 1) + 1,
        "page_size": pager.page_size,
    }


def _group(group: Group, live: Sequence[Live]) -> dict[str, Any]:
    return {
        "number": group.number,
        "task": list(group.task),
        "size": group.size,
        "begun": group.begun,
        "prompt": group.prompt,
        "root": -1 if group.root is None else live.index(group.root),
    }


def _ungroup(values: Mapping[str, Any], live: Sequence[Live]) -> Group:
    root = None if values["root"] < 0 else live[values["root"]]
    return Group(**{**values, "task": Task(*values["task"]), "root": root})


def _part(values: Mapping[str, Any], live: Sequence[Live]) -> Part:
    trajectory = from_json(values["trajectory"])
    start = trajectory.turns.pop().start
    return Part(trajectory, live[values["sequence"]], start, values["seconds"])
