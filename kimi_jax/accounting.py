"""How many parameters a model has, by part, without allocating any."""

from __future__ import annotations

import dataclasses
import math

import jax

from kimi_jax import canonical
from kimi_jax.config import Model
from kimi_jax.modules import transformer


@dataclasses.dataclass(frozen=True)
class Part:
    """Parameters of one component, and how many of them a token uses."""

    name: str
    total: int
    active: int


def parameter_parts(model: Model) -> list[Part]:
    """Parameters by component, in reading order.

    Active follows the K3 report: of the routed experts those that a token uses, and no
    input embedding, which is a look-up.
    """
    params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))[
        "params"
    ]
    totals: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        part = part_of(canonical.path_name(path))
        totals[part] = totals.get(part, 0) + math.prod(leaf.shape)
    active_share = {"routed experts": (model.moe.num_active, model.moe.num_experts)}
    parts = []
    for name in [n for n in _ORDER if n in totals]:
        total = totals[name]
        used, of = active_share.get(name, (1, 1))
        active = 0 if name == "embedding" else total * used // of
        parts.append(Part(name, total, active))
    return parts


_ORDER = (
    "embedding",
    "KDA",
    "MLA",
    "GQA",
    "dense FFN",
    "routed experts",
    "shared experts",
    "latent projections",
    "router",
    "attention residuals",
    "norms",
    "output head",
    "vision tower",
    "vision projector",
)


def part_of(name: str) -> str:
    """The component of a parameter, from its path, stacked or canonical."""
    keys = name.split("/")
    leaf = keys[-1]
    if "vision" in keys:
        return "vision projector" if "projector" in keys else "vision tower"
    if leaf in ("embed", "unembed"):
        return {"embed": "embedding", "unembed": "output head"}[leaf]
    for kind in ("kda", "mla", "gqa"):
        if kind in keys:
            return kind.upper()
    if "shared" in keys:
        return "shared experts"
    if leaf.startswith("experts_"):
        return "routed experts"
    if leaf.startswith("latent_"):
        return "latent projections"
    if leaf == "router":
        return "router"
    if "mlp" in keys:
        return "dense FFN"
    if leaf in ("query", "gain", "weight"):
        return "attention residuals"
    return "norms"
