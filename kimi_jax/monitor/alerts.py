"""Alerts: what is wrong with a run, read off its records and nothing else.

`Alerts` sees the records of a run in order and says what has just gone wrong. An alert
is raised when its condition begins and not again until it has ended. All memory comes
from the records, so showing a resumed run's old records to a new `Alerts` rebuilds it.
Thresholds are `config.alerts`; docs/health.md says what to do about each alert.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from kimi_jax import config

# Records before a running median is a median of anything.
_FEWEST = 5
_SHOWN = 6  # layers or experts that a message names


class Alert(NamedTuple):
    """Something that began at `step`: `value` is past `threshold`."""

    name: str
    step: int
    value: float
    threshold: float
    message: str


class _Found(NamedTuple):
    """A condition that holds now, and where."""

    place: str
    value: float


class Alerts:
    """Sees records, raises alerts."""

    def __init__(self, alerts: config.Alerts):
        self._cfg = alerts
        self._losses: deque[float] = deque(maxlen=alerts.window)
        self._rates: deque[float] = deque(maxlen=alerts.window)
        self._idle: dict[tuple[int, int], int] = {}  # (layer, expert): steps
        self._step = 0
        self._active: dict[str, set[str]] = {name: set() for name in _CHECKS}

    def see(self, record: Mapping[str, Any]) -> list[Alert]:
        """The alerts that `record` raises; all but "train" and "run" raise none."""
        if record["kind"] == "run":
            # Another machine has another speed, and another start another data order.
            self._rates.clear()
            self._step = record["step"]
        if record["kind"] != "train":
            return []
        self._follow_idle(record)
        raised = [self._raise(name, record) for name in _CHECKS]
        for values, name in (
            (self._losses, "loss"),
            (self._rates, "tokens_per_second"),
        ):
            value = record.get(name, math.nan)
            if math.isfinite(value):
                values.append(value)
        self._step = record["step"]
        return [alert for alert in raised if alert is not None]

    def _raise(self, name: str, record: Mapping[str, Any]) -> Alert | None:
        threshold = getattr(self._cfg, name)
        if threshold is None:
            return None
        check, text, worst = _CHECKS[name]
        found = list(check(self, record, threshold))
        places = {item.place for item in found}
        new = [item for item in found if item.place not in self._active[name]]
        self._active[name] = places
        if not new:
            return None
        value = worst(item.value for item in new)
        where = [item.place for item in new if item.place]
        more = ["..."] * (len(where) > _SHOWN)
        message = text.format(
            value=value,
            threshold=threshold,
            where=", ".join(where[:_SHOWN] + more),
        )
        return Alert(name, record["step"], value, threshold, message)

    def _follow_idle(self, record: Mapping[str, Any]) -> None:
        steps = record["step"] - self._step
        idle = {
            (int(layer), expert)
            for layer, experts in record.get("idle_experts", {}).items()
            for expert in experts
        }
        self._idle = {key: self._idle.get(key, 0) + steps for key in sorted(idle)}

    def _layers(self, record: Mapping[str, Any], name: str) -> Iterator[_Found]:
        layers = record.get("layers", {})
        numbers = layers.get("moe/layer_index", [])
        for number, value in zip(numbers, layers.get(name, []), strict=False):
            yield _Found(f"layer {number}", value)

    def _low_entropy(self, record: Mapping[str, Any], low: float) -> Iterator[_Found]:
        found = self._layers(record, "moe/load_entropy")
        yield from (item for item in found if item.value < low)

    def _large_move(self, record: Mapping[str, Any], high: float) -> Iterator[_Found]:
        found = self._layers(record, "moe/bias_update")
        yield from (item for item in found if item.value > high)

    def _dead(self, record: Mapping[str, Any], most: int) -> Iterator[_Found]:
        for (layer, expert), steps in self._idle.items():
            if steps >= most:
                yield _Found(f"expert {expert} of layer {layer}", steps)

    def _spike(self, record: Mapping[str, Any], most: float) -> Iterator[_Found]:
        over = record.get("loss_max", math.nan) - _median(self._losses)
        if over > most:
            yield _Found("", over)

    def _slow(self, record: Mapping[str, Any], most: float) -> Iterator[_Found]:
        rate = record.get("tokens_per_second", math.nan)
        lost = 1.0 - rate / _median(self._rates)
        if lost > most:
            yield _Found("", lost)

    def _starved(self, record: Mapping[str, Any], most: float) -> Iterator[_Found]:
        share = record.get("data_wait_share", math.nan)
        if share > most:
            yield _Found("", share)


def _beyond(name: str, *, below: bool = False) -> Callable[..., Iterator[_Found]]:
    """The check of one number of reinforcement learning."""

    def check(
        _: Alerts, record: Mapping[str, Any], threshold: float
    ) -> Iterator[_Found]:
        value = record.get("rl", {}).get(name, math.nan)
        if value < threshold if below else value > threshold:
            yield _Found("", value)

    return check


_CHECKS: dict[str, tuple[Callable[..., Iterator[_Found]], str, Callable]] = {
    "load_entropy": (
        Alerts._low_entropy,
        "load entropy down to {value:.3f}, below {threshold:g}: {where}",
        min,
    ),
    "dead_steps": (
        Alerts._dead,
        "no token for {value} steps (limit {threshold}): {where}",
        max,
    ),
    "bias_update": (
        Alerts._large_move,
        "a router bias moved by {value:.3g} in one step, above {threshold:g}: {where}",
        max,
    ),
    "loss_spike": (
        Alerts._spike,
        "the loss of a step is {value:.3f} nats above the running median (limit "
        "{threshold:g})",
        max,
    ),
    "throughput_drop": (
        Alerts._slow,
        "throughput is {value:.0%} below its running median (limit {threshold:.0%})",
        max,
    ),
    "data_wait": (
        Alerts._starved,
        "{value:.0%} of the time goes into waiting for data (limit {threshold:.0%})",
        max,
    ),
    "policy_kl": (
        _beyond("policy_kl"),
        "the policy moved by {value:.3g} nats a token since it was sampled (limit "
        "{threshold:g})",
        max,
    ),
    "mismatch": (
        _beyond("mismatch"),
        "sampler and learner differ by {value:.3g} nats a token for the same policy "
        "(limit {threshold:g})",
        max,
    ),
    "effective_samples": (
        _beyond("effective_samples", below=True),
        "importance weights leave {value:.0%} of the tokens, below {threshold:.0%}",
        min,
    ),
    "zero_variance": (
        _beyond("zero_variance"),
        "{value:.0%} of the groups have members that are all alike (limit "
        "{threshold:.0%})",
        max,
    ),
    "environment_errors": (
        _beyond("environment_errors"),
        "{value:.0%} of the trajectories ended in an error of their environment (limit "
        "{threshold:.0%})",
        max,
    ),
}


def _median(values: deque[float]) -> float:
    """NaN, which no comparison passes, while there are too few."""
    return float(np.median(values)) if len(values) >= _FEWEST else math.nan
