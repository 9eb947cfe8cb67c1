"""Types of the fields of a published config.json that are looked into or counted with.

All other fields are checked as those of the model that they become.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Kinds = Mapping[str, Any]

_NAMES: dict[Any, str] = {
    dict: "an object",  # or left out, or null
    Mapping: "an object",
    list: "a list of integers",
    int: "an integer above 0",
    float: "a number above 0, or null",
}
_OUTER: Kinds = dict.fromkeys(
    ("text_config", "vision_config", "quantization_config"), dict
)
_TEXT: Kinds = {
    "linear_attn_config": Mapping,
    "quantization_config": dict,
    "attn_res_block_size": float,
    **dict.fromkeys(("num_hidden_layers", "num_experts", "num_experts_per_token"), int),
}
_LINEAR: Kinds = dict.fromkeys(("full_attn_layers", "kda_layers"), list)
_VISION: Kinds = {
    "merge_kernel_size": list,
    "vt_num_attention_heads": int,
    "qkv_hidden_size": int,
}
_QUANTISATION: Kinds = {"config_groups": dict}
_GROUP: Kinds = {"weights": dict}


def wrong_types(published: Any) -> Iterator[str]:
    """A line for each field of another type than the published configs have."""
    if not isinstance(published, dict):
        yield "it is no JSON object"
        return
    yield from _fields("", published, _OUTER)
    text = _section(published, "text_config") or published
    yield from _fields("" if text is published else "text_config.", text, _TEXT)
    yield from _fields(
        "linear_attn_config.", _section(text, "linear_attn_config"), _LINEAR
    )
    yield from _fields("vision_config.", _section(published, "vision_config"), _VISION)
    for holder in {id(x): x for x in (published, text)}.values():
        where, found = "quantization_config", _section(holder, "quantization_config")
        yield from _fields(f"{where}.", found, _QUANTISATION)
        groups = _section(found, "config_groups")
        yield from _fields(
            f"{where}.config_groups.", groups, dict.fromkeys(groups, Mapping)
        )
        for name in groups:
            group = _section(groups, name)
            yield from _fields(f"{where}.config_groups.{name}.", group, _GROUP)


def _section(fields: dict[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _fields(where: str, fields: dict[str, Any], kinds: Kinds) -> Iterator[str]:
    for name, kind in kinds.items():
        if name in fields and not _is(fields[name], kind):
            yield f"{where}{name}={json.dumps(fields[name])}: must be {_NAMES[kind]}"


def _is(value: Any, kind: Any) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is(item, int) for item in value)
    if kind in (dict, Mapping):
        return isinstance(value, dict) or (kind is dict and value is None)
    if kind is float:
        return value is None or (type(value) in (int, float) and value > 0)
    return type(value) is int and value > 0
