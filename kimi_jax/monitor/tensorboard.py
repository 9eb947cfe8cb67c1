"""Records as TensorBoard events, where tensorboardX is installed.

Numbers become scalars, at any depth: `groups` and the lengths of an evaluation as well.
A list with a value for each layer becomes a histogram, with the largest and the mean
value as scalars, so that ninety layers stay readable. Tables (the residual weights) are
left to the report.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_RESERVED_KEYS = ("kind", "step", "time")
# These would only repeat themselves in every tag.
_TRANSPARENT = ("groups", "layers")


def tensorboard_available() -> bool:
    """Whether records are mirrored to TensorBoard, i.e. tensorboardX is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


class TensorBoard:
    """Mirror of the records that opens its event file on the first one, or never."""

    def __init__(self, directory: Path, resume_step: int | None):
        """Events go to `directory`; `resume_step` is None for a fresh run."""
        self._directory = directory
        # TensorBoard hides events of steps that the resumed run repeats.
        self._purge_step = None if resume_step is None else resume_step + 1
        self._writer: Any = None
        self._enabled = tensorboard_available()

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirrors a record of any kind but "run"."""
        if not self._enabled or record["kind"] == "run":
            return
        values = dict(_values(record))
        if not values:
            return
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(
                str(self._directory), purge_step=self._purge_step
            )
        step, when = record["step"], record["time"]
        for name, value in values.items():
            tag = f"{record['kind']}/{name}"
            if not isinstance(value, list):
                self._writer.add_scalar(tag, value, step, walltime=when)
                continue
            finite = np.array([x for x in value if math.isfinite(x)], np.float64)
            if len(finite):
                self._writer.add_histogram(tag, finite, step, walltime=when)
            for part, number in (("max", max(value)), ("mean", np.mean(value))):
                part = f"{tag}/{part}"
                self._writer.add_scalar(part, float(number), step, walltime=when)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _values(
    record: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, float | list[float]]]:
    """(tag, number or list of numbers) for all that can be drawn."""
    for name, value in record.items():
        if (not prefix and name in _RESERVED_KEYS) or name.endswith("/layer_index"):
            continue
        if isinstance(value, Mapping):
            inner = prefix if name in _TRANSPARENT else f"{prefix}{name}/"
            yield from _values(value, inner)
        elif _is_number(value) or (
            isinstance(value, list) and value and all(map(_is_number, value))
        ):
            yield f"{prefix}{name}", value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
