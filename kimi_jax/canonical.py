"""Names for parameters that do not depend on how layers were folded into scans.

The stacked tree of a scanned model is an implementation detail: it changes with the
layer pattern, the residual block size and this library. Checkpoints, reports and tests
use canonical names instead, one array a layer:

    stage_1/block_0_run_0/sublayer_6/mla/q_b [6, 3, ...]   stacked
    layer_015/attention/mla/q_b [...]                      canonical

`flatten` works on any tree that contains such paths, an optimizer state included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import layout
from kimi_jax.config import Model

_TOWER = "vision/layers"  # where the tower's stacked layers are


def flatten(model: Model, tree: Any) -> dict[str, Any]:
    """{canonical name: array} of every leaf of `tree`, in depth order."""
    places = places_of(model)
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        head, stacked, tail = split_name(name)
        if stacked is None:
            flat[name] = leaf
            continue
        for place in places[stacked]:
            flat[f"{head}{place.name}{tail}"] = leaf[place.at]
    return dict(sorted(flat.items()))


def unflatten(model: Model, flat: Mapping[str, Any], template: Any) -> Any:
    """Tree of `template`'s structure with the arrays of `flat`; inverse of `flatten`.

    Raises:
      ValueError: names that are missing or left over, or shapes that differ.
    """
    places = places_of(model)
    used: set[str] = set()
    problems: list[str] = []

    def fetch(name: str, shape: tuple[int, ...]) -> Any:
        used.add(name)
        if name not in flat:
            problems.append(f"{name}: missing")
            return None
        if tuple(flat[name].shape) != shape:
            problems.append(f"{name}: shape {flat[name].shape}, expected {shape}")
        return flat[name]

    def restore(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        head, stacked, tail = split_name(name)
        if stacked is None:
            return fetch(name, tuple(leaf.shape))
        here = places[stacked]
        inner = tuple(leaf.shape)[len(here[0].at) :]
        cells = [fetch(f"{head}{place.name}{tail}", inner) for place in here]
        return None if problems else jnp.stack(cells).reshape(leaf.shape)

    tree = jax.tree_util.tree_map_with_path(restore, template)
    problems += [f"{name}: not in the model" for name in flat if name not in used]
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (
            len(problems) > 20
        )
        raise ValueError("parameters do not match the model:\n  " + "\n  ".join(shown))
    return tree


def routes(model: Model, stats: Any) -> jax.Array:
    """routes_BTLA, the layers with experts in order of depth.

    Args:
      stats: of a forward pass that was asked for routes, and for nothing else.
    """
    return jnp.stack(list(flatten(model, stats).values()), axis=2)


def fingerprint(flat: Mapping[str, Any]) -> str:
    """Digest of names, shapes and dtypes; equal for trees that can be exchanged."""
    lines = [f"{name} {flat[name].shape} {flat[name].dtype}\n" for name in sorted(flat)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def path_name(path: Any) -> str:
    """ "a/b/c" of a key path, whatever kinds of keys it has."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def places_of(model: Model) -> dict[str, list[layout.Place]]:
    """What each stacked path of the tree holds, the layers of its vision tower too."""
    places: dict[str, list[layout.Place]] = {}
    for place in layout.places(layout.plan(model)):
        places.setdefault(place.path, []).append(place)
    if model.vision is not None:
        places[_TOWER] = [
            layout.Place(f"vision/layer_{i:03d}", _TOWER, (i,), "vision", i)
            for i in range(model.vision.num_layers)
        ]
    return places


def split_name(name: str) -> tuple[str, str | None, str]:
    """(before, stacked path, after) around the scanned part of `name`, if any."""
    keys = name.split("/")
    for i, key in enumerate(keys):
        if key.startswith("stage_"):
            depth = 2 if keys[i + 1].endswith("_start") else 3
            head = "".join(k + "/" for k in keys[:i])
            tail = "".join("/" + k for k in keys[i + depth :])
            return head, "/".join(keys[i : i + depth]), tail
        if keys[i : i + 2] == _TOWER.split("/"):
            head = "".join(k + "/" for k in keys[:i])
            return head, _TOWER, "".join("/" + k for k in keys[i + 2 :])
    return name, None, ""
