"""Lists of settings for `get_hyper()`, from plain dicts of overrides.

A setting is a dict of overrides by dotted name, such as {"train.seed": 1}; the name
"arg" is what follows the colon in --config=FILE.py:arg. A list of settings is a sweep.

    product(grid("optimizer.learning_rate", 1e-3, 2e-3), seeds(3))       6 settings
    zipped(grid("model.width", 64, 128), grid("model.kda.num_heads", 2, 4))     2
    chain([{}], grid("model.residual.kind", "none"))     the config itself, and a change
"""

from collections.abc import Iterable
from itertools import product as _product
from typing import Any

Setting = dict[str, Any]


def grid(name: str, *values: Any) -> list[Setting]:
    """One setting for each value of one field."""
    return [{name: value} for value in values]


def seeds(count: int) -> list[Setting]:
    """`train.seed` from 0 to count - 1."""
    return grid("train.seed", *range(count))


def product(*sweeps: Iterable[Setting]) -> list[Setting]:
    """Every combination; the last sweep changes fastest."""
    return [_merge(parts) for parts in _product(*sweeps)]


def zipped(*sweeps: Iterable[Setting]) -> list[Setting]:
    """The first settings of all sweeps together, the second ones, and so on.

    Raises:
      ValueError: the sweeps are not equally long.
    """
    lists = [list(sweep) for sweep in sweeps]
    if len({len(settings) for settings in lists}) > 1:
        raise ValueError(f"zipped: sweeps of {[len(x) for x in lists]} settings")
    return [_merge(parts) for parts in zip(*lists, strict=True)]


def chain(*sweeps: Iterable[Setting]) -> list[Setting]:
    """The settings of all sweeps, one sweep after the other."""
    return [dict(setting) for sweep in sweeps for setting in sweep]


def _merge(parts: Iterable[Setting]) -> Setting:
    merged: Setting = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"two sweeps that are combined both set {twice[0]!r}")
        merged |= part
    return merged
