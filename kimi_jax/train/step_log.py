"""The "train" records of a run: what the steps since the last line came to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter, Record
from kimi_jax.train import health, optimizer
from kimi_jax.train.step import State


class StepLog:
    """Averages the steps since the last line; one "train" record a line."""

    def __init__(
        self,
        cfg: Config,
        data: loader.Data,
        metrics: MetricsWriter,
        progress: Progress,
    ):
        self._cfg, self._metrics, self._progress = cfg, metrics, progress
        self._bytes_W = data.tokenizer.bytes_per_token
        self._schedule = optimizer.schedule(cfg.optimizer, cfg.train.steps)
        self._rows: list[tuple[Any, Any, Any, float]] = []
        self._loads: dict[str, jax.Array] = {}
        self._waited = 0.0
        self._started = time.monotonic()

    def restart(self) -> None:
        """Start the clock again: what happened since the last line was no step."""
        self._started = time.monotonic()

    def timed(self, batches: Iterable[loader.Batch]) -> Iterator[loader.Batch]:
        """`batches`, whose making counts as waiting for data."""
        source = iter(batches)
        while True:
            asked = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited += time.monotonic() - asked
            yield batch

    def add(self, metrics: Mapping[str, Any], host: loader.Batch) -> None:
        """A step's metrics, still on the device, and the batch it saw."""
        num_bytes = float((self._bytes_W[host["targets"]] * host["weights"]).sum())
        names = ("loss", "predicted", "finite")
        loss, predicted, finite = (metrics[name] for name in names)
        self._rows.append((loss, predicted, finite, num_bytes))
        loads = health.expert_loads(metrics["stats"])
        if self._loads:
            loads = {name: jnp.add(self._loads[name], x) for name, x in loads.items()}
        self._loads = loads

    def write(self, step: int, metrics: Mapping[str, Any], state: State) -> Record:
        """The record of the steps up to `step`; waits for the device."""
        cfg = self._cfg
        losses = self._losses()
        seconds = time.monotonic() - self._started
        steps = len(self._rows)
        step_tokens = cfg.train.batch_size * cfg.train.seq_len
        record = self._metrics.write(
            "train",
            step,
            **losses,
            learning_rate=float(self._schedule(step - 1)),
            gradient_norm=metrics["gradient_norm"],
            tokens=step * step_tokens,
            tokens_per_second=steps * step_tokens / seconds,
            step_seconds=seconds / steps,
            data_wait=min(1.0, self._waited / seconds),
            groups=metrics["groups"],
            layers=health.layer_metrics(cfg.model, metrics["stats"], state.balance),
            idle_experts=health.idle_experts(cfg.model, self._loads),
        )
        self._progress.update(record, step, cfg.train.steps)
        self._rows.clear()
        self._loads, self._waited = {}, 0.0
        self.restart()
        return record

    def _losses(self) -> dict[str, float]:
        """Means over the steps that were applied; NaN if none was."""
        rows = [
            (float(loss) * float(n), float(n), num_bytes)
            for loss, n, finite, num_bytes in self._rows
            if bool(finite)
        ]
        skipped = len(self._rows) - len(rows)
        if not rows:
            nan = dict.fromkeys(("loss", "loss_max", "bits_per_byte"), math.nan)
            return nan | {"skipped": skipped}
        nats, tokens, num_bytes = np.sum(rows, axis=0)
        return {
            "loss": nats / tokens,
            "loss_max": max(nats / n for nats, n, _ in rows),
            "bits_per_byte": nats / math.log(2) / num_bytes,
            "skipped": skipped,
        }
