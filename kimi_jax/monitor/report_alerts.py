"""The report's section on alerts: what was raised, when, and how often."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_SHOWN = 20


def alerts_section(alerts: Sequence[Mapping[str, Any]]) -> str:
    """Markdown from the "alert" records of a run in file order; "" if there are none.

    Each alert is listed at the step where its condition began, the first of them first.
    """
    if not alerts:
        return ""
    counts = Counter(str(alert.get("name")) for alert in alerts)
    counted = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    lines = [
        "## Alerts",
        "",
        f"Raised: {counted}. docs/health.md says what each one means and what to do.",
        "",
        "| step | alert | what began |",
        "| ---: | --- | --- |",
    ]
    for alert in alerts[:_SHOWN]:
        message = " ".join(str(alert.get("message", "")).split()).replace("|", "\\|")
        lines.append(f"| {alert['step']:,} | {alert.get('name')} | {message} |")
    if len(alerts) > _SHOWN:
        lines += ["", f"And {len(alerts) - _SHOWN} later ones."]
    return "\n".join(lines)
