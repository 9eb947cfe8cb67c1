"""What the routers and the depth attention did in a step, as lists by layer."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kimi_jax import canonical
from kimi_jax.config import Model
from kimi_jax.ops import balancing


def layer_metrics(model: Model, stats: Any, balance: Any) -> dict[str, list]:
    """Monitoring values of one step, JSON-ready.

    Args:
      stats: what the layers sowed, stacked by scan, summed over micro-batches.
      balance: router state after the step.

    Returns:
      "moe/..." lists with an entry for each MoE layer, whose numbers are
      "moe/layer_index", and "residual/..." lists with one for each sublayer and a last
      one for the output. Absent where the model has no such part.
    """
    flat = canonical.flatten(model, jax.device_get(stats))
    biases = canonical.flatten(model, jax.device_get(balance))
    loads = {name: x for name, x in flat.items() if name.endswith("/moe/load_E")}
    depth = {name: x for name, x in flat.items() if name.endswith("/depth_weights")}
    metrics: dict[str, list] = {}
    if loads:
        bias_range = {
            name.split("/")[0]: float(np.ptp(bias)) for name, bias in biases.items()
        }
        layers = [name.split("/")[0] for name in loads]
        load_LE = np.stack(list(loads.values()))
        metrics = {
            "moe/layer_index": [int(layer.removeprefix("layer_")) for layer in layers],
            "moe/max_violation": _each(balancing.max_violation, load_LE),
            "moe/load_entropy": _each(balancing.load_entropy, load_LE),
            "moe/dead_experts": (load_LE == 0).sum(axis=1).tolist(),
            "moe/bias_range": [bias_range[layer] for layer in layers],
        }
    if depth:
        weights_LS = np.stack(list(depth.values()))
        metrics["residual/weights"] = weights_LS.tolist()
        metrics["residual/entropy"] = _entropy(weights_LS).tolist()
    return metrics


def _each(function: Any, load_LE: np.ndarray) -> list[float]:
    return [float(function(load_E)) for load_E in load_LE]


def _entropy(weights_LS: np.ndarray) -> np.ndarray:
    """Entropy of each row in nats; unused sources have weight zero."""
    return -(weights_LS * np.log(np.maximum(weights_LS, 1e-30))).sum(axis=-1)
