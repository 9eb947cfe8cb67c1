"""The latest records of a run for Prometheus to scrape: http://HOST:PORT/metrics.

A name in a record says how it is called here:

    train  loss                       kimi_jax_train_loss
    eval   bits_per_byte              kimi_jax_eval_bits_per_byte
    groups gradient_rms/kda           kimi_jax_gradient_rms{group="kda"}
    layers moe/max_violation, a list  kimi_jax_moe_max_violation{layer="3"}
    eval   lengths/1024/loss          kimi_jax_eval_length_loss{length="1024"}
    eval   .../position_loss/64       kimi_jax_eval_position_loss{length=,upto="64"}

Steps, tokens, seconds in steps, and records by kind are counters, which end in _total.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

from kimi_jax.errors import UserError

_RESERVED_KEYS = ("kind", "step", "time")
# Fields of "train" records that only grow, over all sessions of a run.
_COUNTERS = {
    "step": "steps",
    "tokens": "tokens",
    "productive_seconds": "productive_seconds",
}


class Sample(NamedTuple):
    """One number of one metric; `kind` is "gauge" or "counter"."""

    name: str
    kind: str
    labels: Mapping[str, str]
    value: float


class Exporter:
    """Serves what `write` was given last; a context manager.

    Serving happens in a thread, so a scrape never holds up a step.
    """

    def __init__(self, port: int):
        """Starts to serve on all interfaces of this host.

        Raises:
          UserError: prometheus_client is not installed, or the port cannot be had.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise UserError(
                f"config.monitor.prometheus_port={port}: needs prometheus_client; "
                "pip install prometheus_client, or set the field to none"
            ) from error
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._counts: dict[str, int] = {}
        self._samples: tuple[Sample, ...] = ()
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, registry=registry
            )
        except OSError as error:
            raise UserError(
                f"config.monitor.prometheus_port={port}: cannot be served "
                f"({error.strerror}); choose another port, or none for no endpoint"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """From now on `record` is the latest of its kind."""
        kind = record["kind"]
        self._latest[kind] = record
        self._counts[kind] = self._counts.get(kind, 0) + 1
        # One assignment: a scrape sees all of a record or none of it.
        self._samples = (*samples(self._latest), *_record_counts(self._counts))

    def collect(self) -> Iterator[Any]:
        """prometheus_client's own types, a family for each metric."""
        from prometheus_client import core

        types = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
        }
        families: dict[str, Any] = {}
        for name, kind, labels, value in self._samples:
            if name not in families:
                families[name] = types[kind](name, f"{name} of the run", labels=labels)
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()

    def close(self) -> None:
        """Stop serving; the port is free afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def samples(latest: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """What the latest record of each kind amounts to."""
    for kind, record in latest.items():
        if kind == "run":
            continue
        for name, value in record.items():
            if name not in _RESERVED_KEYS and _is_number(value):
                yield _gauge(f"{kind}_{name}", {}, value)
        for name, value in record.get("groups", {}).items():
            metric, _, group = name.rpartition("/")
            yield _gauge(metric, {"group": group}, value)
        yield from _layers(record.get("layers", {}))
        yield from _lengths(record.get("lengths", {}))
    train = latest.get("train", {})
    for field, name in _COUNTERS.items():
        if field in train:
            yield Sample(f"kimi_jax_{name}", "counter", {}, train[field])


def _layers(layers: Mapping[str, list[Any]]) -> Iterator[Sample]:
    for name, values in layers.items():
        section, _, last = name.partition("/")
        numbers = isinstance(values, list) and all(map(_is_number, values))
        if last == "layer_index" or not numbers:
            continue
        index = layers.get(f"{section}/layer_index", [])
        if len(index) != len(values):
            index = list(range(len(values)))
        for layer, value in zip(index, values, strict=True):
            yield _gauge(name, {"layer": str(layer)}, value)


def _lengths(lengths: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    for length, record in lengths.items():
        for name, value in record.items():
            if isinstance(value, Mapping):
                for upto, number in value.items():
                    labels = {"length": length, "upto": upto}
                    yield _gauge(f"eval_{name}", labels, number)
            else:
                yield _gauge(f"eval_length_{name}", {"length": length}, value)


def _record_counts(counts: Mapping[str, int]) -> Iterator[Sample]:
    for kind, count in counts.items():
        yield Sample("kimi_jax_records", "counter", {"kind": kind}, count)


def _gauge(name: str, labels: Mapping[str, str], value: float) -> Sample:
    clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    return Sample(f"kimi_jax_{clean}", "gauge", labels, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
