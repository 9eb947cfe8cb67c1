"""Alerts of a running experiment: written down, shown, and followed."""

from __future__ import annotations

import pathlib

from kimi_jax import config, distributed
from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics
from kimi_jax.monitor.alerts import Alert, Alerts
from kimi_jax.monitor.console import Progress


class Alarmed(UserError):
    """An alert of `config.alerts.stop` was raised; the run has saved."""


class Alarm:
    """Raises the alerts of each record."""

    def __init__(
        self,
        alerts: config.Alerts,
        writer: metrics.Writer,
        progress: Progress,
    ):
        self._alerts, self._stop = Alerts(alerts), alerts.stop
        self._writer, self._progress = writer, progress
        # A resumed run goes on where its records are.
        for record in writer.records():
            self._alerts.see(record)

    def see(self, record: metrics.Record) -> list[Alert]:
        """Report what `record` raises; returns the alerts that should end the run.

        Records tell of times, which differ between processes: the leader decides.
        """
        raised = self._alerts.see(record)
        for alert in raised:
            fields = alert._asdict()
            self._writer.write("alert", fields.pop("step"), **fields)
            self._progress.warn(f"alert {alert.name}: {alert.message}")
        if not self._stop:
            return []
        stopping = [alert._asdict() for alert in raised if alert.name in self._stop]
        return [Alert(**fields) for fields in distributed.broadcast(stopping)]


def stop_message(alerts: list[Alert], folder: pathlib.Path) -> str:
    """What the user reads when alerts have ended a run."""
    lines = [f"  {alert.name}: {alert.message}" for alert in alerts]
    return (
        f"stopped by config.alerts.stop after step {alerts[0].step}, which is saved:\n"
        + "\n".join(lines)
        + f"\nlook at {folder / 'report.md'} (python -m experiments.report "
        f"--workdir={folder}) and docs/health.md; the same command goes on from there, "
        "with '--config.alerts.stop=()' whatever is raised"
    )
