"""Checkpoints: asynchronous, atomic, under names that outlive the scan layout.

The tree on disk uses the names of `kimi_jax.canonical`, one array a layer:
`params/layer_007/attention/kda/q`. So a state is read back onto another mesh, in
another dtype, or by a model whose layers fold into other scans.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy

from kimi_jax import canonical, config, config_io
from kimi_jax.train import checkpoint_files as files
from kimi_jax.train.checkpoint_files import CheckpointError
from kimi_jax.train.step import State

_SHOWN = 10  # differing names of one kind in a message


class Durable(NamedTuple):
    """A save that is whole on disk."""

    step: int
    bytes: int
    seconds: float  # from the call to the last byte
    blocking_seconds: float  # of them, how long the loop stood still


class Checkpointer:
    """Saves `State` in `workdir/checkpoints` as a context manager, one at a time.

    Where several processes work on one run each has one, and calls the same methods in
    the same order; each writes and reads what its devices hold.

    Keeps the last `train.checkpoint_keep`, and for good those whose step divides by
    `train.checkpoint_keep_every`.

    Args:
      data_identity: what the batches were made of, such as digests of the token stores
        and of the tokenizer; a resumed run must be given the same.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        cfg: config.Config,
        data_identity: Mapping[str, str],
    ):
        self._workdir = pathlib.Path(workdir).absolute()
        self._model = cfg.model
        self._data = dict(data_identity)
        self._about = {
            "config": config_io.to_dict(cfg),
            "versions": files.versions(),
            "data": self._data,
        }
        self._handler = files.StateHandler()
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(files.STATE, ocp.args.PyTreeSave, self._handler)
        self._manager = ocp.CheckpointManager(
            self._workdir / files.FOLDER,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_preservation(cfg.train),
                cleanup_tmp_directories=True,
                lightweight_initialize=True,
            ),
            handler_registry=registry,
        )
        self._in_flight: Durable | None = None
        self._started = 0.0
        self._durable: list[Durable] = []

    def latest_step(self) -> int | None:
        """The last durable step; a save that is under way does not count."""
        found = files.steps(self._workdir)
        return found[-1] if found else None

    def save(self, state: State, extra: bytes = b"") -> None:
        """Start writing `state`; returns once it is copied off the device.

        Args:
          extra: what the run keeps besides; durable with the state or not at all.

        Raises:
          CheckpointError: this write or an earlier one failed, for example on a full
            disk. Earlier checkpoints are intact.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # What a save costs starts here: above, the loop waited for its own step.
        started = time.monotonic()
        self.wait()
        flat = _to_host(self._model, state)
        params = {name: x for name, x in flat.items() if name.startswith("params/")}
        self._handler.about = self._about | {
            "parameters": canonical.fingerprint(params)
        }
        self._handler.extra = extra
        tree = traverse_util.unflatten_dict(flat, sep="/")
        args = ocp.args.Composite(**{files.STATE: ocp.args.PyTreeSave(tree)})
        try:
            self._manager.save(step, args=args)
        except Exception as error:
            raise self._failed(step, error) from error
        self._in_flight = Durable(step, 0, 0.0, time.monotonic() - started)
        self._started = started

    def wait(self) -> None:
        """Block until every save is durable; raises CheckpointError if one failed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(None, error) from error
        self._collect()

    def take_durable(self) -> list[Durable]:
        """The saves that became durable since the last call.

        Raises:
          CheckpointError: a write failed.
        """
        if self._in_flight is not None and not self._manager.is_saving_in_progress():
            self.wait()
        taken, self._durable = self._durable, []
        return taken

    def restore(
        self,
        template: State,
        note: Callable[[str], None] = lambda _: None,
        *,
        step: int | None = None,
    ) -> State:
        """A saved state, with the structure, dtypes and shardings of `template`.

        Args:
          template: arrays, or `jax.ShapeDtypeStruct`s with shardings.
          step: the one to read; None: the newest.
          note: is told what differs but is no reason to stop.

        Raises:
          CheckpointError: there is none, it is damaged, it is not of this model, or the
            run was fed other data.
        """
        folder = files.find(self._workdir)
        if step is not None:
            folder = folder.parent / str(step)
        about = files.read_about(folder)
        _check_data(folder, about["data"], self._data)
        for line in _version_notes(about["versions"]):
            note(line)
        return State(**_restore(folder, self._model, template._asdict()))

    def restore_extra(self) -> bytes:
        """The `extra` of the newest save; raises CheckpointError if it has none."""
        return files.read_extra(files.find(self._workdir))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whoever presses Ctrl-C a second time does not want to wait for a save.
        if error is not None and not isinstance(error, Exception):
            return
        # The save under way may need a process that is no more.
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            return
        try:
            self._manager.close()
        except Exception as failure:
            if error is None:
                raise self._failed(None, failure) from failure

    def _collect(self) -> None:
        if self._in_flight is not None:
            self._durable.append(
                self._in_flight._replace(
                    bytes=self._handler.bytes_written,
                    seconds=self._handler.finished - self._started,
                )
            )
            self._in_flight = None

    def _failed(self, step: int | None, error: Exception) -> CheckpointError:
        if step is None and self._in_flight is not None:
            step = self._in_flight.step
        what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        return CheckpointError(
            f"{what} could not be written to {self._manager.directory}: {error}\n"
            f"the last whole one is step {self.latest_step()}; free some space or "
            "choose another --workdir, then run the same command to resume"
        )


def _preservation(train: config.Train) -> preservation_policy.PreservationPolicy:
    policies: list[preservation_policy.PreservationPolicy] = [
        preservation_policy.LatestN(train.checkpoint_keep)
    ]
    if train.checkpoint_keep_every is not None:
        policies.append(preservation_policy.EveryNSteps(train.checkpoint_keep_every))
    return preservation_policy.AnyPreservationPolicy(policies)


def _to_host(model: config.Model, state: State) -> dict[str, np.ndarray | jax.Array]:
    """Canonical names and host arrays; views where the device is the host.

    orbax copies host arrays before `save` returns, so the views need not outlive it.
    Slicing on the host compiles nothing and takes no device memory. Arrays that reach
    over several hosts are sliced where they are.
    """

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        # The array itself would keep the view, and then could not be donated.
        return np.asarray(leaf.addressable_data(0) if _whole(leaf) else leaf)

    tree = state._asdict()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    flat = canonical.flatten(model, jax.tree.map(fetch, tree))
    # Indexing a NumPy array down to one number gives a scalar of another kind.
    return {
        name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        for name, leaf in flat.items()
    }


def _whole(leaf: jax.Array) -> bool:
    return leaf.sharding.is_fully_replicated


class _Stack:
    """Stands for a stacked array in `canonical.flatten`, which indexes it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any):
        self.shape, self.dtype, self.sharding = shape, dtype, sharding

    def __getitem__(self, at: tuple[int, ...]) -> _Stack:
        sharding = self.sharding
        if isinstance(sharding, NamedSharding):
            inner = tuple(sharding.spec)[len(at) :]
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*inner))
        return _Stack(self.shape[len(at) :], self.dtype, sharding)


def _restore(folder: pathlib.Path, model: config.Model, template: Any) -> Any:
    """The tree of `template` from a checkpoint, which may hold other trees besides."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(
        lambda x: getattr(x, "sharding", None) or default, template
    )
    leaves = jax.tree.map(
        lambda x, where: _Stack(x.shape, x.dtype, where), template, shardings
    )
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in canonical.flatten(model, leaves).items()
    }
    stored = {
        name: leaf
        for name, leaf in files.stored_arrays(folder).items()
        if name.split("/")[0] in template
    }
    _check_names(folder, wanted, stored)
    flat = files.read_arrays(folder, wanted)
    return jax.tree.map(
        jax.device_put, canonical.unflatten(model, flat, template), shardings
    )


def _check_names(
    folder: pathlib.Path, wanted: files.Arrays, stored: files.Arrays
) -> None:
    lines: list[str] = []
    pairs = ((wanted, stored, "model"), (stored, wanted, "checkpoint"))
    for here, there, where in pairs:
        lines += _first(
            f"{name} {leaf.shape}: only in the {where}"
            for name, leaf in here.items()
            if name not in there
        )
    lines += _first(
        f"{name}: {stored[name].shape} in the checkpoint, {like.shape} in the model"
        for name, like in wanted.items()
        if name in stored and stored[name].shape != like.shape
    )
    if lines:
        raise CheckpointError(
            f"checkpoint {folder} does not fit this model:\n  "
            + "\n  ".join(lines)
            + f"\nuse the config it was trained with, which is in {files.STATE}/"
            f"{files.ABOUT}, or name another checkpoint or --workdir"
        )


def _first(lines: Iterable[str]) -> list[str]:
    """A readable number of lines of one kind.

    Parameters first: the optimizer's copies of them only say it again.
    """
    ordered = sorted(lines, key=lambda line: not line.startswith("params/"))
    rest = len(ordered) - _SHOWN
    return ordered[:_SHOWN] + [f"... and {rest} more like these"] * (rest > 0)


def _check_data(
    folder: pathlib.Path, then: Mapping[str, str], now: Mapping[str, str]
) -> None:
    lines = [
        f"{name}: {then.get(name, 'absent')} at the save, {now.get(name, 'absent')} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
    if lines:
        raise CheckpointError(
            f"the data changed since checkpoint {folder} was saved:\n  "
            + "\n  ".join(lines)
            + "\nbring the former data back to resume this run, or name another "
            "--workdir to start one on the new data"
        )


def _version_notes(then: Mapping[str, str]) -> list[str]:
    return [
        f"saved with {package} {then.get(package, 'unknown')}, resumed with {version}: "
        "the run goes on, but its numbers may differ from here by rounding"
        for package, version in files.versions().items()
        if then.get(package) != version
    ]
