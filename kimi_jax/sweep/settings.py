"""From overrides to runs: each setting checked, with an id that only it has.

The id is a hash of what a setting says, in the types of the schema: neither the order
of the fields nor the spelling of a value (1e-3, 0.001) changes it. It names the folder
of the run, so a sweep that is changed keeps the runs that it still contains.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kimi_jax import config_io
from kimi_jax.config import Config
from kimi_jax.errors import UserError

ARGUMENT = "arg"  # not a field: what follows the colon of --config
_SEEDS = ("train.seed", "data.seed")
_SHOWN = 10
_DIGITS = 8

Overrides = Mapping[str, Any]
Load = Callable[[str], Mapping[str, Any]]  # argument of get_config -> plain values


class Setting(NamedTuple):
    """One run of a sweep."""

    id: str
    argument: str  # of get_config; may be empty
    overrides: dict[str, Any]  # all of them by field, as the config has them
    config: Config
    swept: dict[str, Any]  # those that the sweep itself sets, the argument included

    @property
    def group(self) -> dict[str, Any]:
        """What the setting is apart from its seeds."""
        return {k: v for k, v in self.swept.items() if k not in _SEEDS}


def make_settings(
    hyper: Sequence[Overrides],
    load: Load,
    *,
    argument: str = "",
    common: Sequence[str] = (),
) -> list[Setting]:
    """The settings of a sweep, in its order.

    Args:
      hyper: what `get_hyper` returned.
      load: the values of the experiment file for an argument.
      argument: for settings that have none of their own.
      common: overrides "a.b=c" from the command line, for all settings.

    Raises:
      UserError: there are no settings, one is not a valid config, or two are one; with
        a line for each problem.
    """
    _check_form(hyper)
    settings = []
    found: dict[str, list[str]] = {}  # the settings with each problem
    for number, overrides in enumerate(hyper, 1):
        try:
            settings.append(_make(overrides, load, argument, common))
        except UserError as error:
            lines = getattr(error, "problems", None) or str(error).splitlines()
            head = f"setting {number} ({describe(overrides)})"
            for line in lines:
                found.setdefault(line, []).append(head)
    problems = [
        f"{head}{f' and {len(rest)} more' * bool(rest)}: {line}"
        for line, (head, *rest) in found.items()
    ]
    problems += _doubles(settings)
    if problems:
        rest = len(problems) - _SHOWN
        more = [f"... and {rest} more like these"] * (rest > 0)
        count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
        raise UserError(
            "\n  - ".join(
                [f"the sweep has {count}; nothing has run:", *problems[:_SHOWN], *more]
            )
        )
    return settings


def describe(overrides: Overrides) -> str:
    """ "depth=2 learning_rate=0.001": the argument, and fields by their last names.

    Fields that share a last name have their section's before it: "kda.num_heads=8".
    """
    last = collections.Counter(map(_last, overrides))
    words = []
    for name, value in overrides.items():
        shown = _last(name)
        if last[shown] > 1:
            shown = ".".join(name.split(".")[-2:])
        text = config_io.to_text(value)
        words.append(text if name == ARGUMENT else f"{shown}={text}")
    return " ".join(words) or "as in the file"


def arguments(file: str, setting: Setting) -> list[str]:
    """The flags of experiments.train for a setting, --workdir apart."""
    config = f"{file}:{setting.argument}" if setting.argument else file
    flags = [
        f"--config.{k}={config_io.to_text(v)}" for k, v in setting.overrides.items()
    ]
    return [f"--config={config}", *flags]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _check_form(hyper: Any) -> None:
    if not isinstance(hyper, Sequence) or not hyper:
        raise UserError("get_hyper() must return a list of at least one setting")
    for number, overrides in enumerate(hyper, 1):
        if not isinstance(overrides, Mapping) or not all(
            isinstance(name, str) for name in overrides
        ):
            raise UserError(
                f"setting {number} of get_hyper() is {overrides!r}; write a dict of "
                "overrides, such as {'train.seed': 1}"
            )


def _make(
    overrides: Overrides, load: Load, argument: str, common: Sequence[str]
) -> Setting:
    fields = dict(overrides)
    argument = str(fields.pop(ARGUMENT, argument))
    shared = [override.partition("=")[0] for override in common]
    twice = [name for name in shared if name in fields]
    if twice:
        raise UserError(
            f"config.{twice[0]}: the sweep sets it itself; take --config.{twice[0]} "
            "from the command line"
        )
    lines = [
        *common,
        *(f"{name}={config_io.to_text(value)}" for name, value in fields.items()),
    ]
    config = config_io.from_dict(load(argument), lines)
    values = config_io.to_dict(config)
    resolved = {name: _at(values, name) for name in (*shared, *fields)}
    swept = {name: resolved[name] for name in fields}
    if argument:
        swept = {ARGUMENT: argument, **swept}
    said = resolved | ({ARGUMENT: argument} if argument else {})
    return Setting(_id(said), argument, resolved, config, swept)


def _id(said: Overrides) -> str:
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values[key]
    return values


def _doubles(settings: Sequence[Setting]) -> list[str]:
    """A line for each setting that is one before it, by its id or by its config."""
    ids: dict[Any, Setting] = {}
    problems = []
    for setting in settings:
        for key in (setting.id, setting.config):
            other = ids.setdefault(key, setting)
            if other is not setting:
                problems.append(
                    f"({describe(setting.swept)}) and ({describe(other.swept)}) are "
                    "one and the same run; name it once"
                )
                break
    return problems
