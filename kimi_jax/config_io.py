"""From plain values to a checked `Config`: parsing, overrides, and every complaint.

`ml_collections` alone would reject an unknown key with a bare AttributeError, refuse
to override a field whose value is None, and let `--config.model={}` replace a whole
section. The schema in `config` knows every type, so overrides are read by type here
and each problem comes with its fix. Problems are gathered and raised together.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax import config as schema
from kimi_jax import config_rules
from kimi_jax.errors import UserError

# Fields that came later, and what a config without them meant: runs that began before
# them go on. Whoever adds a field to the schema adds a line here.
_LATER = {
    "alerts.policy_kl": None,
    "alerts.mismatch": None,
    "alerts.effective_samples": None,
    "alerts.zero_variance": None,
    "alerts.environment_errors": None,
    "rl": None,
    "model.kda.residuals": "all",
}
# Of a tuple of these; of anything else, a tuple of tuples is the example.
_EXAMPLES = {str: "('a', 'b')", int: "(512, 4096)", float: "(0.0, 1.0)"}


class ConfigError(UserError):
    """One or more problems of a config; `problems` holds a line for each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        head = f"the config has {len(problems)} problem" + "s" * (len(problems) > 1)
        super().__init__("\n  - ".join([head + ":", *problems]))


def from_dict(
    values: Mapping[str, Any], overrides: Sequence[str] = ()
) -> schema.Config:
    """Checked `Config` from nested plain values and overrides.

    Args:
      overrides: "a.b=c"; "a.b" sets a switch.

    Raises:
      ConfigError: unknown keys (with the nearest name), wrong types, values that are
        not allowed, missing fields, sizes that do not fit together.
    """
    problems: list[str] = []
    tree = _plain(values)
    for override in overrides:
        _apply_override(tree, override, problems)
    built = _build(schema.Config, tree, "config", problems)
    if problems:
        raise ConfigError(problems)
    config = typing.cast(schema.Config, built)
    problems += config_rules.check(config)
    if problems:
        raise ConfigError(problems)
    return config


def model_from_dict(values: Mapping[str, Any]) -> schema.Model:
    """Checked `Model` from nested plain values; lists may stand for tuples.

    Raises:
      ConfigError: as `from_dict`.
    """
    problems: list[str] = []
    built = _build(schema.Model, _plain(values), "config.model", problems)
    if not problems:
        problems += config_rules.check_model(built)
    if problems:
        raise ConfigError(problems)
    return typing.cast(schema.Model, built)


def add_later_fields(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, a whole config as it was stored, with the fields that came later."""
    values = copy.deepcopy(values)
    for path, value in _LATER.items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section.get(part, {})
        section.setdefault(name, value)
    return values


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, JSON-ready; `from_dict` reads them back."""
    return dataclasses.asdict(config)


def to_text(value: Any) -> str:
    """A value as an override spells it; `from_dict` reads it back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _plain(values: Any) -> Any:
    if hasattr(values, "to_dict"):
        values = values.to_dict()
    if isinstance(values, Mapping):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return tuple(map(_plain, values))
    return values


def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _unknown(path: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {path}.{near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{path}.{name}: no such field; {hint}"


def _apply_override(tree: dict[str, Any], override: str, problems: list[str]) -> None:
    dotted, equals, text = override.partition("=")
    cls: Any = schema.Config
    node, path, keys = tree, "config", dotted.split(".")
    for depth, key in enumerate(keys):
        known = _types(cls)
        if key not in known:
            problems.append(_unknown(path, key, list(known)))
            return
        kind, path = known[key], f"{path}.{key}"
        cls = _section_of(kind)
        is_section, is_last = dataclasses.is_dataclass(cls), depth == len(keys) - 1
        if is_section and is_last:
            if equals and cls is not kind and _parse(kind, text) is None:
                node[key] = None
                return
            first = next(iter(_types(cls)))
            problems.append(
                f"{path}: a section, not a value; set its fields one by one, "
                f"e.g. --{path}.{first}=..."
            )
            return
        if not is_section and not is_last:
            problems.append(f"{path}: a value, not a section; it has no fields")
            return
        if is_last and not equals and kind is not bool:
            problems.append(f"{path}: no value; write --{path}=VALUE")
        elif is_last:
            node[key] = _parse(kind, text if equals else "true")
        elif cls is not kind and node.get(key) is None:
            problems.append(
                f"{path}: none in this config, so it has no fields; start from a "
                "config file that has the section"
            )
            return
        elif not isinstance(node.setdefault(key, {}), dict):
            return  # a section replaced by a value in the file: _build reports it
        else:
            node = node[key]


def _section_of(kind: Any) -> Any:
    """The section that an optional one is when it is there; `kind` if it is none."""
    inner = [arg for arg in typing.get_args(kind) if dataclasses.is_dataclass(arg)]
    return inner[0] if inner else kind


def _parse(kind: Any, text: str) -> Any:
    """The value that `text` spells; _build judges whether it fits."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if text in ("None", "none", ""):
            return None
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return _parse(inner[0], text)
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        if typing.get_origin(item_kind) is tuple:
            return _plain(_literal(text))
        if item_kind is str and not text:
            return ("",)  # the shell takes the quotes of ''
        items = text.strip().strip("()[]").split(",")
        return tuple(_parse(item_kind, i.strip(" '\"")) for i in items if i.strip())
    if kind is str or origin is typing.Literal:
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = _literal(text)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3 is a fine way to write a step count
    return value


def _literal(text: str) -> Any:
    """The Python value that `text` spells, or `text` itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def _build(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """`value` as an instance of `kind`; on a problem, notes it and returns None."""
    if dataclasses.is_dataclass(kind):
        return _build_section(typing.cast(type, kind), value, path, problems)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return _build(inner[0], value, path, problems)
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{path}={value!r}: allowed are {list(allowed)}{hint}")
        return value
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        if not isinstance(value, tuple):
            example = _EXAMPLES.get(item_kind, "((0.0, 1.0),)")
            problems.append(f"{path}={value!r}: must be a tuple, such as {example}")
            return None
        return tuple(
            _build(item_kind, item, f"{path}[{i}]", problems)
            for i, item in enumerate(value)
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and str(value).strip("+-").lower() in ("nan", "inf", "infinity"):
        problems.append(f"{path}={value}: must be a finite number")
    elif type(value) is not kind:
        got = type(value).__name__
        problems.append(f"{path}={value!r}: must be {kind.__name__}, is {got}")
    return value


def _build_section(cls: type, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(f"{path}={value!r}: must be a section with fields")
        return None
    known = _types(cls)
    fields = {}
    for name in value:
        if name not in known:
            problems.append(_unknown(path, name, list(known)))
    for name, kind in known.items():
        if name not in value:
            problems.append(f"{path}.{name}: missing; was the section replaced?")
        else:
            fields[name] = _build(kind, value[name], f"{path}.{name}", problems)
    return cls(**fields) if len(fields) == len(known) else None
