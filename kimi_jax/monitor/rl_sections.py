"""Sections of the report on reinforcement learning: success, health, time.

As in `sections`, each has a function that draws and one that writes; runs without
records of the kind have neither.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kimi_jax.monitor import plots
from kimi_jax.monitor.markdown import number, table
from kimi_jax.monitor.runs import Run, last, series

# Title, label of the y axis, name in the records.
_HEALTH_PANELS = (
    ("Reward", "of a trajectory", "reward"),
    ("KL of the update", "nats a token", "policy_kl"),
    ("Clipped", "share of the tokens", "clip_share"),
    ("Effective sample size", "share of the tokens", "effective_samples"),
    ("Entropy", "nats a token", "entropy"),
    ("KL to the reference", "nats a token", "reference_kl"),
    ("Groups without a difference", "share of the groups", "zero_variance"),
    ("Environment errors", "share of the trajectories", "environment_errors"),
    ("Turns", "of a trajectory", "turns"),
    ("Tokens of the policy", "of a trajectory", "policy_tokens"),
    ("Staleness", "versions", "staleness"),
    ("Sampler and learner", "mean gap, nats a token", "mismatch"),
    ("Routing overlap", "share of the experts", "routing_overlap"),
)
_TIME_PANELS = (
    ("Writing trajectories", "seconds an iteration", "rollout_seconds"),
    ("Learning", "seconds an iteration", "learn_seconds"),
    ("Tokens of the policy", "per second of writing", "rollout_tokens_per_second"),
    ("Tokens learned", "per second of learning", "learn_tokens_per_second"),
)
_SPLITS = {
    "by_difficulty": "Success by difficulty",
    "by_length": "Success by length (tokens)",
    "by_environment": "Success by environment",
}


def draw_rl(run: Run) -> dict[str, Figure]:
    """Success, health and time over steps; nothing for a supervised run."""
    records = _numbers(run.train)
    if not records:
        return {}
    held_out = _numbers(run.eval)
    success = {"training tasks": series(records, "success")}
    if held_out:
        success["held-out tasks"] = series(held_out, "success")
    panels: dict[str, dict[str, plots.Series]] = {"Success": success}
    for name, title in _SPLITS.items():
        source = held_out or records
        lines = _lines(source, name)
        if len(lines) > 1:
            where = "held-out" if held_out else "training"
            panels[f"{title}, {where} tasks"] = lines
    reasons = _lines(records, "truncated")
    if any(np.nanmax(line.values, initial=0.0) > 0 for line in reasons.values()):
        panels["Trajectories cut off, share by reason"] = reasons
    figures = {"rl_success": plots.named_figure(panels)}
    for name, table_of_panels in (
        ("rl_health", _HEALTH_PANELS),
        ("rl_time", _TIME_PANELS),
    ):
        drawn = [
            plots.Panel(title, label, series(records, field))
            for title, label, field in table_of_panels
        ]
        drawn = [p for p in drawn if np.isfinite(p.series.values).any()]
        if drawn:
            figures[name] = plots.history_figure(drawn)
    return figures


def summarise_rl(run: Run) -> dict[str, Any]:
    """The first, best and last success, and what it took."""
    records, held_out = _numbers(run.train), _numbers(run.eval)
    if not records:
        return {}
    shown = held_out or records
    rates = [r["success"] for r in shown.values() if "success" in r]
    sums = {
        name: sum(r.get(name, 0.0) for r in records.values())
        for name in ("rollout_seconds", "learn_seconds", "trajectories")
    }
    return {
        "iterations": last(records).get("iteration"),
        "success_on": "held-out tasks" if held_out else "training tasks",
        "first_success": rates[0] if rates else None,
        "best_success": max(rates, default=None),
        "success": rates[-1] if rates else None,
        **sums,
    }


def rl_section(summary: Mapping[str, Any], figures: Sequence[str]) -> str:
    """What was reached, and the plots that exist."""
    rows = [
        (f"success on {summary['success_on']}, first", summary["first_success"]),
        ("best", summary["best_success"]),
        ("last", summary["success"]),
        ("iterations", summary["iterations"]),
        ("trajectories", summary["trajectories"]),
        ("seconds of writing trajectories", summary["rollout_seconds"]),
        ("seconds of learning", summary["learn_seconds"]),
    ]
    parts = [
        "## Reinforcement learning",
        "\n".join(table(("result", "value"), [(k, _show(v)) for k, v in rows])),
        "![Success](plots/rl_success.png)",
    ]
    if "rl_health" in figures:
        parts += [
            "![Health](plots/rl_health.png)",
            "docs/rl.md says what is well, and what to do where it is not.",
        ]
    if "rl_time" in figures:
        parts.append("![Time](plots/rl_time.png)")
    return "\n\n".join(parts)


def _show(value: Any) -> str:
    whole = isinstance(value, int | float) and float(value).is_integer() and value > 1
    return number(int(value), "{:,}") if whole else number(value)


def _numbers(records: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {step: r["rl"] for step, r in records.items() if "rl" in r}


def _lines(
    records: Mapping[int, Mapping[str, Any]], name: str
) -> dict[str, plots.Series]:
    """A line for each key of a table of numbers."""
    keys = dict.fromkeys(k for r in records.values() for k in r.get(name, {}))
    ordered = sorted(keys, key=lambda k: (len(k), k) if k.isdigit() else (0, k))
    steps = np.array(list(records), int)
    return {
        key: plots.Series(
            steps,
            np.array(
                [r.get(name, {}).get(key, math.nan) for r in records.values()],
                np.float64,
            ),
        )
        for key in ordered
    }
