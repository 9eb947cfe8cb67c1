"""What the layers did in a step, as lists by layer (docs/health.md says what is well).

Names are "part/metric". A part's "layer_index" holds the layers that its other lists
have an entry for; the residual lists have one for each sublayer, and, but for
"residual/rms", a last one for the output. A model that lacks a part lacks its lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from kimi_jax import canonical
from kimi_jax.config import Model
from kimi_jax.ops import balancing, decay

Lists = dict[str, list]
_LOAD = "/moe/load_E"
# Experts named for each layer: enough to follow some when a router has collapsed.
_MOST_IDLE = 32


def layer_metrics(model: Model, stats: Any, balance: Any) -> Lists:
    """Monitoring values of one step, JSON-ready.

    Args:
      stats: of the step's metrics, stacked by scan.
      balance: router state after the step.
    """
    flat = canonical.flatten(model, jax.device_get(stats))
    biases = canonical.flatten(model, jax.device_get(balance))
    metrics: Lists = {}
    if load_E := _column(flat, _LOAD):
        metrics |= _named("moe", load_E, _moe(flat, np.stack([*load_E.values()])))
        bias_E = _column(biases, "/moe/bias")
        metrics["moe/bias_range"] = [float(np.ptp(x)) for x in bias_E.values()]
    if sampled := _column(flat, "/kda/sampled"):
        metrics |= _named("kda", sampled, _kda(flat))
    if dense := _column(flat, "/mlp/hidden_max"):
        metrics |= _named("mlp", dense, {"activation_max": [*dense.values()]})
    squares = [x for name, x in flat.items() if name.endswith("/stream_square")]
    if squares:
        metrics["residual/rms"] = np.sqrt(squares).tolist()
    depth = [x for name, x in flat.items() if name.endswith("/depth_weights")]
    if depth:
        weights_LS = np.stack(depth)
        metrics["residual/weights"] = weights_LS.tolist()
        metrics["residual/entropy"] = _entropy(weights_LS).tolist()
    return metrics


def expert_loads(stats: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The loads among the statistics of a step, still on the device."""
    return {name: x for name, x in stats.items() if name.endswith(_LOAD)}


def idle_experts(model: Model, loads: Any) -> dict[str, list[int]]:
    """{layer: experts without a token}, for the layers that have some.

    Args:
      loads: `expert_loads`, of one step or summed over several.
    """
    load_E = _column(canonical.flatten(model, jax.device_get(loads)), _LOAD)
    idle = {str(layer): np.flatnonzero(x == 0) for layer, x in load_E.items()}
    return {k: x[:_MOST_IDLE].tolist() for k, x in idle.items() if len(x)}


def _moe(flat: Mapping[str, Any], load_LE: Any) -> dict[str, Any]:
    tokens_L, dropped_L, bare_L = (
        np.stack([*_column(flat, f"/moe/{name}").values()])
        for name in ("tokens", "dropped_slots", "unrouted_tokens")
    )
    lists = {
        "max_violation": balancing.max_violation(load_LE),
        "load_entropy": balancing.load_entropy(load_LE),
        "dead_experts": (load_LE == 0).sum(axis=1),
        "bias_update": [*_column(flat, "/moe/bias_update").values()],
        "dropped_share": dropped_L / np.maximum(dropped_L + load_LE.sum(axis=1), 1),
        "unrouted_share": bare_L / np.maximum(tokens_L, 1),
        "activation_max": [*_column(flat, "/moe/hidden_max").values()],
    }
    if shared := _column(flat, "/moe/shared/hidden_max"):
        lists["shared_activation_max"] = [*shared.values()]
    return lists


def _kda(flat: Mapping[str, Any]) -> dict[str, Any]:
    def mean(name: str, count: str) -> list[Any]:
        sums, counts = (_column(flat, f"/kda/{key}") for key in (name, count))
        return [x / max(int(counts[layer]), 1) for layer, x in sums.items()]

    above_LQ = mean("decay_above_Q", "sampled")
    lists: dict[str, Any] = {
        f"alpha_q{percent:02d}": [
            decay.alpha_quantile(above_Q, percent / 100) for above_Q in above_LQ
        ]
        for percent in (5, 50, 95)
    }
    if at_bound := mean("at_bound", "sampled"):
        lists["at_bound"] = at_bound
    lists["beta"] = mean("beta", "sampled")
    lists["tile_decay"] = [*_column(flat, "/kda/tile_decay").values()]
    lists["state_rms"] = np.sqrt(mean("state_square", "state_rows"))
    return lists


def _column(flat: Mapping[str, Any], suffix: str) -> dict[int, Any]:
    """{layer: value} of the names that end in `suffix`."""
    return {
        int(name.split("/")[0].removeprefix("layer_")): x
        for name, x in flat.items()
        if name.endswith(suffix)
    }


def _named(part: str, layers: Mapping[int, Any], lists: Mapping[str, Any]) -> Lists:
    """Lists under their part's name, with the layers that they are about."""
    named = {f"{part}/layer_index": list(layers)}
    return named | {f"{part}/{k}": np.asarray(v).tolist() for k, v in lists.items()}


def _entropy(weights_LS: np.ndarray) -> np.ndarray:
    """Entropy of each row in nats; unused sources have weight zero."""
    return -(weights_LS * np.log(np.maximum(weights_LS, 1e-30))).sum(axis=-1)
