"""What must hold in how a run is watched, each rule with its fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kimi_jax.config import Alerts, Config, profile_steps

_ALERTS = tuple(
    field.name
    for field in dataclasses.fields(Alerts)
    if field.name not in ("window", "stop")
)
_SHARES = (
    "load_entropy",
    "throughput_drop",
    "data_wait",
    "effective_samples",
    "zero_variance",
    "environment_errors",
)


def check(config: Config) -> list[str]:
    """Every broken rule of `config.alerts` and `config.monitor`."""
    return [*_alerts(config.alerts), *_monitor(config)]


def _alerts(alerts: Alerts) -> Iterator[str]:
    for name in _SHARES:
        share = getattr(alerts, name)
        if share is not None and not 0.0 < share < 1.0:
            yield f"config.alerts.{name}={share}: a share between 0 and 1, or none"
    for name in ("bias_update", "loss_spike", "policy_kl", "mismatch"):
        limit = getattr(alerts, name)
        if limit is not None and not limit > 0.0:
            yield f"config.alerts.{name}={limit}: must be positive, or none"
    if alerts.window < 5:
        yield f"config.alerts.window={alerts.window}: a median needs at least 5 records"
    for name in alerts.stop:
        if name not in _ALERTS:
            yield f"config.alerts.stop: {name!r} is not one of {list(_ALERTS)}"
        elif getattr(alerts, name) is None:
            yield (
                f"config.alerts.stop: {name!r} is off, so it cannot stop the run; set "
                f"config.alerts.{name} or take it out of stop"
            )


def _monitor(config: Config) -> Iterator[str]:
    monitor = config.monitor
    where = f"config.monitor.profile={monitor.profile!r}"
    try:
        steps = profile_steps(monitor)
    except ValueError as error:
        yield f"{where}: {error}"
    else:
        if steps is not None and steps[-1] > config.train.steps:
            yield (
                f"{where}: the run has {config.train.steps} steps; end at "
                f"{config.train.steps + 1} or before"
            )
    port = monitor.prometheus_port
    if port is not None and not 1 <= port <= 65535:
        yield (
            f"config.monitor.prometheus_port={port}: must be between 1 and 65535, or "
            "none for no endpoint"
        )
