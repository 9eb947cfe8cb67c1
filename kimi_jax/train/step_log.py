"""The "train" records of a run: what the steps since the last line came to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import distributed, flops, hardware
from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import Record, Writer
from kimi_jax.train import health, optimizer
from kimi_jax.train.batch import Share
from kimi_jax.train.clock import clock_of
from kimi_jax.train.step import State


class StepLog:
    """Averages the steps since the last line; one "train" record a line."""

    def __init__(
        self,
        cfg: Config,
        data: loader.Data,
        metrics: Writer,
        progress: Progress,
        mesh: jax.sharding.Mesh,
        share: Share,
    ):
        self._cfg, self._metrics, self._progress = cfg, metrics, progress
        self._share = share
        self._bytes_W = data.tokenizer.bytes_per_token
        self._schedule = optimizer.schedule(cfg.optimizer, cfg.train.steps)
        self._rows: list[tuple[Any, Any, Any, float]] = []
        self._loads: dict[str, jax.Array] = {}
        self._step_flops = flops.step_flops(cfg)
        peak = hardware.peak_flops(mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * mesh.size
        self._clock = clock_of(metrics.records())

    def batches(self, source: loader.Source, start: int, stop: int) -> Iterator[Any]:
        """`loader.iterate`, timed; the clock starts when the first batch is wanted."""
        self._clock.start()
        yield from self._clock.waiting(loader.iterate(source, start, stop))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """For what is no step: waits for the device, then stops the clock."""
        if self._rows:
            jax.block_until_ready(self._rows[-1][0])
        with self._clock.stopped():
            yield

    def add(self, metrics: Mapping[str, Any], host: loader.Batch) -> None:
        """A step's metrics, still on the device, and our rows of the batch it saw."""
        num_bytes = float((self._bytes_W[host["targets"]] * host["weights"]).sum())
        names = ("loss", "predicted", "finite")
        loss, predicted, finite = (metrics[name] for name in names)
        self._rows.append((loss, predicted, finite, num_bytes))
        loads = health.expert_loads(metrics["stats"])
        if self._loads:
            loads = {name: jnp.add(self._loads[name], x) for name, x in loads.items()}
        self._loads = loads

    def write(self, step: int, metrics: Mapping[str, Any], state: State) -> Record:
        """The record of the steps up to `step`; waits for device and processes."""
        cfg = self._cfg
        losses = self._losses()
        steps = len(self._rows)
        step_tokens = cfg.train.batch_size * cfg.train.seq_len
        record = self._metrics.write(
            "train",
            step,
            **losses,
            learning_rate=float(self._schedule(step - 1)),
            gradient_norm=metrics["gradient_norm"],
            tokens=step * step_tokens,
            **self._rates(steps, step_tokens),
            groups=metrics["groups"],
            layers=health.layer_metrics(cfg.model, metrics["stats"], state.balance),
            idle_experts=health.idle_experts(cfg.model, self._loads),
        )
        self._progress.update(record, step, cfg.train.steps)
        self._rows.clear()
        self._loads = {}
        return record

    def _rates(self, steps: int, step_tokens: int) -> dict[str, float]:
        """How fast the last `steps` were; mfu is absent where no peak is known."""
        lap = self._clock.lap()
        seconds = lap.steps / steps
        rates = {
            "step_seconds": seconds,
            "tokens_per_second": step_tokens / seconds,
            "flops_per_second": self._step_flops / seconds,
            "data_wait_share": lap.waited / lap.steps,
            "productive_seconds": self._clock.productive,
            "productive_share": self._clock.productive_share,
        }
        if self._peak is not None:
            rates["mfu"] = rates["flops_per_second"] / self._peak
        return rates

    def _losses(self) -> dict[str, float]:
        """Means over the steps that were applied; NaN if none was."""
        rows = [
            (float(loss) * float(n), float(n), num_bytes)
            for (loss, n, finite, _), num_bytes in zip(
                self._rows, self._bytes(), strict=True
            )
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

    def _bytes(self) -> list[float]:
        """Of text in the batch of each step, over all readers."""
        mine = [num_bytes for *_, num_bytes in self._rows]
        # Processes that hold the same rows have counted the same bytes.
        shares = dict(distributed.gather((self._share.reader, mine)))
        return [sum(step) for step in zip(*shares.values(), strict=True)]
