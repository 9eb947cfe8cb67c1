"""The "train" records of a run: what the steps since the last line came to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter
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
        self._rows: list[tuple[Any, Any, float]] = []
        self._started = time.monotonic()

    def restart(self) -> None:
        """Start the clock again: what happened since the last line was no step."""
        self._started = time.monotonic()

    def add(self, metrics: Mapping[str, Any], host: loader.Batch) -> None:
        """A step's metrics, still on the device, and the batch it saw."""
        num_bytes = float((self._bytes_W[host["targets"]] * host["weights"]).sum())
        self._rows.append((metrics["loss"], metrics["predicted"], num_bytes))

    def write(self, step: int, metrics: Mapping[str, Any], state: State) -> None:
        """The record of the steps up to `step`; waits for the device."""
        cfg = self._cfg
        rows = [(float(loss) * float(n), float(n), b) for loss, n, b in self._rows]
        nats, tokens, num_bytes = np.sum(rows, axis=0)
        seconds = (time.monotonic() - self._started) / len(rows)
        step_tokens = cfg.train.batch_size * cfg.train.seq_len
        record = self._metrics.write(
            "train",
            step,
            loss=nats / tokens,
            bits_per_byte=nats / math.log(2) / num_bytes,
            learning_rate=float(self._schedule(step - 1)),
            gradient_norm=metrics["gradient_norm"],
            tokens=step * step_tokens,
            tokens_per_second=step_tokens / seconds,
            step_seconds=seconds,
            layers=health.layer_metrics(cfg.model, metrics["stats"], state.balance),
        )
        self._progress.update(record, step, cfg.train.steps)
        self._rows.clear()
        self.restart()
