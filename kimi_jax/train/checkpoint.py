"""Checkpoints: asynchronous, atomic, under names that outlive the scan layout.

orbax writes each step into a temporary folder and renames it when it is whole, so a
killed run leaves its last whole checkpoint behind. The tree on disk uses the names of
`kimi_jax.canonical`: `params/layer_007/attention/kda/q`, one array a layer.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from kimi_jax import canonical, config
from kimi_jax.errors import UserError
from kimi_jax.train.step import State


class CheckpointError(UserError):
    """A checkpoint could not be written, or does not fit the model."""


class Checkpointer:
    """Saves and restores `State` in `workdir/checkpoints`, keeping the last few."""

    def __init__(self, workdir: pathlib.Path, model: config.Model, keep: int):
        self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._model = model
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: State) -> None:
        """Start writing `state`; returns once it is copied off the device.

        Raises:
          CheckpointError: this write or an earlier one failed, for example on a full
            disk. Earlier checkpoints are intact.
        """
        step = int(state.step)
        if step == self.latest_step():
            return
        names = canonical.flatten(self._model, state._asdict())
        tree = traverse_util.unflatten_dict(names, sep="/")
        try:
            self._manager.save(step, args=ocp.args.StandardSave(tree))
        except Exception as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Block until every save is durable; raises CheckpointError if one failed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(None, error) from error

    def restore(self, template: State) -> State:
        """The newest state, with the structure and sharding of `template`.

        Raises:
          CheckpointError: the stored parameters are not those of the model; the
            differing names are listed.
        """
        step = self.latest_step()
        expected = _abstract(self._model, template)
        self._check_names(step, expected)
        tree = self._manager.restore(
            step,
            args=ocp.args.StandardRestore(
                traverse_util.unflatten_dict(expected, sep="/")
            ),
        )
        flat = traverse_util.flatten_dict(tree, sep="/")
        restored = canonical.unflatten(self._model, flat, template._asdict())
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding),
            restored,
            template._asdict(),
        )
        return State(**placed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def _check_names(self, step: int | None, expected: Mapping[str, Any]) -> None:
        stored = traverse_util.flatten_dict(
            dict(self._manager.item_metadata(step)), sep="/"
        )
        lines = [
            f"{name}: {tuple(stored[name].shape)} stored, {like.shape} in the model"
            for name, like in expected.items()
            if name in stored and tuple(stored[name].shape) != tuple(like.shape)
        ]
        pairs = ((expected, stored, "model"), (stored, expected, "checkpoint"))
        for here, there, where in pairs:
            lines += [
                f"{name}: only in the {where}" for name in here if name not in there
            ]
        # Parameters say it all; the optimizer's copies of them would say it again.
        lines.sort(key=lambda line: not line.startswith("params/"))
        if lines:
            more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} does not fit this model:\n  "
                + "\n  ".join(lines[:20] + more)
                + "\nuse the config it was trained with, or another --workdir"
            )

    def _failed(self, step: int | None, error: Exception) -> CheckpointError:
        what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        return CheckpointError(
            f"{what} could not be written to {self.directory}: {error}\n"
            f"the last whole one is step {self.latest_step()}; free some space or "
            "choose another --workdir, then run the same command to resume"
        )


def _abstract(model: config.Model, template: State) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and dtypes on disk; host memory is the landing place."""
    flatten = jax.eval_shape(
        lambda tree: canonical.flatten(model, tree), template._asdict()
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in flatten.items()
    }
