"""What a run does about a step whose loss, gradient or update is not finite.

The compiled step never applies it. This file notices it, keeps the evidence and follows
`config.train.on_nonfinite`:

    stop   the run ends; what is on disk is the last checkpoint
    skip   the step counts as done with nothing learned, and the next batch follows;
           more than `max_skips` in a row end the run

Looking at a result waits for the device, so the host looks one step late, while the
device works on the next one. That one is told (`go`) whether the step before it was
finite and otherwise holds still: the state that the host then sees is the state that
the bad step began with, and the search for the cause is exact.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from kimi_jax import distributed, sharding
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics
from kimi_jax.monitor.console import Progress
from kimi_jax.train.batch import Batch, Share, by_name, on_mesh
from kimi_jax.train.forensics import explain
from kimi_jax.train.step import State

FOLDER = "nonfinite"  # of the workdir; one file for each bad batch
ALERT = "nonfinite"
_READ_SECONDS = 600
_CALM = (
    "lower --config.optimizer.learning_rate or --config.optimizer.clip_norm in a new "
    "--workdir"
)


class NonFinite(UserError):
    """A step was not finite, and the policy says stop."""


class _Taken(NamedTuple):
    """A step whose result has not been looked at."""

    step: int
    metrics: Any
    host: Any


class Feed(NamedTuple):
    """How a step is given what the host has read."""

    place: Callable[[Any], Any]  # onto the mesh
    by_name: Callable[[Any], dict[str, jax.Array]]  # the arrays that were placed
    as_text: Callable[[Any], Batch]  # what was placed, for the search of the cause


def text_feed(mesh: jax.sharding.Mesh, share: Share) -> Feed:
    """Of supervised training: batches of the loader."""
    rows = sharding.batch_sharding(mesh)
    return Feed(lambda host: on_mesh(host, rows, share), by_name, lambda batch: batch)


class GuardedStep:
    """(step, state, host batch) -> (state, metrics); raises NonFinite a step late."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        cfg: Config,
        mesh: jax.sharding.Mesh,
        folder: pathlib.Path,
        writer: metrics.Writer,
        progress: Progress,
        feed: Feed,
    ):
        self._compiled, self._cfg, self._folder = compiled, cfg, folder
        self._feed, self._go = feed, go(mesh)
        self._writer, self._progress = writer, progress
        self._last: _Taken | None = None
        # A resumed run goes on counting the steps that were skipped.
        self._skipped = set(
            distributed.on_leader(
                "skipped steps",
                lambda: [
                    record["step"]
                    for record in writer.records()
                    if record["kind"] == "alert" and record.get("name") == ALERT
                ],
                timeout=_READ_SECONDS,
            )
        )

    def __call__(
        self, step: int, state: State, host: Any
    ) -> tuple[State, dict[str, Any]]:
        batch = self._feed.place(host)
        go = self._go if self._last is None else self._last.metrics["finite"]
        state, metrics = self._compiled(state, batch, go)
        if self.settle(state):
            # This step held still because the one before it was skipped.
            state, metrics = self._compiled(state, batch, self._go)
        self._last = _Taken(step, metrics, host)
        return state, metrics

    def settle(self, state: State) -> bool:
        """Look at the last step now. Returns whether it was skipped.

        Raises:
          NonFinite: it was not finite, and may not be skipped.
        """
        last, self._last = self._last, None
        if last is None or bool(last.metrics["finite"]):
            return False
        self._skipped.add(last.step)
        batch = self._feed.place(last.host)
        file = self._save(last.step, batch)
        text = self._feed.as_text(batch)
        cause = explain(self._cfg, state, text, last.metrics["groups"])
        loss, norm = (float(last.metrics[name]) for name in ("loss", "gradient_norm"))
        message = (
            f"step {last.step} is not finite (loss {loss}, gradient norm {norm}) and "
            f"was not applied. It began in {cause}. Its batch is in {file}"
        )
        self._writer.write("alert", last.step, name=ALERT, message=message)
        self._progress.warn(message)
        self._decide(last.step, message)
        return True

    def _decide(self, step: int, message: str) -> None:
        train = self._cfg.train
        if train.on_nonfinite == "stop":
            raise NonFinite(
                f"{message}\n{_CALM}, or leave such batches out, from the last "
                "checkpoint on, with --config.train.on_nonfinite=skip"
            )
        in_a_row = 0
        while step - in_a_row in self._skipped:
            in_a_row += 1
        if in_a_row > train.max_skips:
            raise NonFinite(
                f"{message}\n{in_a_row} steps in a row, more than config.train."
                f"max_skips={train.max_skips}: it is not the batch; {_CALM}"
            )

    def _save(self, step: int, batch: Any) -> pathlib.Path:
        folder = self._folder / FOLDER
        path = folder / f"step_{step:08d}.npz"
        arrays: dict[str, Any] = {
            name: distributed.whole(x) for name, x in self._feed.by_name(batch).items()
        }
        if distributed.is_leader():
            folder.mkdir(exist_ok=True)
            np.savez_compressed(path, step=step, **arrays)
        return path


def go(mesh: jax.sharding.Mesh) -> jax.Array:
    """True on every device, as the compiled step takes it."""
    return jax.device_put(np.True_, sharding.replicated(mesh))
