"""Muon for matrices, AdamW for the rest, from one table (Kimi K3 report Sec. 2.5).

Each parameter name stands in the table once, with the axes that Muon orthogonalises
and whether weight decay applies. All other axes of a Muon parameter are batch axes:
scan stacks, experts, and the heads of q, k and v. So "per head" is a choice of axes,
and with heads sharded it needs no communication (`kimi_jax.train.muon`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from kimi_jax import config
from kimi_jax.canonical import path_name
from kimi_jax.train.muon import scale_by_muon, sides


class Rule(NamedTuple):
    """How a parameter is updated; axes count from the end, past any stack."""

    muon: MuonDimensionNumbers | None  # None: AdamW
    decay: bool


_MATRIX = Rule(MuonDimensionNumbers(-2, -1), decay=True)  # [in, out], [E, in, out]
_HEADS = Rule(MuonDimensionNumbers(-3, -1), decay=True)  # [in, H, out], each head alone
_JOINT_HEADS = Rule(MuonDimensionNumbers(-4, -1), decay=True)  # [in, 3, H, out]
_FROM_HEADS = Rule(MuonDimensionNumbers((-3, -2), -1), decay=True)  # [H, in, out]
_TO_HEADS = Rule(MuonDimensionNumbers(-3, (-2, -1)), decay=True)  # [in, H, out], whole
_TABLE = Rule(None, decay=True)  # lookup tables, which have no input to balance
_VECTOR = Rule(None, decay=False)

# Queries, keys and values: one orthogonalisation a head. kv_b keeps the key and value
# rows of a head together.
PER_HEAD = ("q", "k", "v", "q_b", "kv_b")

RULES: dict[str, Rule] = {
    **dict.fromkeys(PER_HEAD, _HEADS),
    **dict.fromkeys(("f_b", "g", "g_b"), _TO_HEADS),
    **dict.fromkeys(("o", "out"), _FROM_HEADS),
    **dict.fromkeys(("q_a", "kv_a", "f_a", "g_a", "beta"), _MATRIX),
    **dict.fromkeys(("gate", "up", "down", "router"), _MATRIX),
    **dict.fromkeys(("latent_down", "latent_up"), _MATRIX),
    **dict.fromkeys(("experts_gate", "experts_up", "experts_down"), _MATRIX),
    **dict.fromkeys(("embed", "unembed"), _TABLE),
    **dict.fromkeys(("norm", "o_norm", "latent_norm"), _VECTOR),
    **dict.fromkeys(("q_a_norm", "kv_a_norm", "gain"), _VECTOR),
    **dict.fromkeys(("q_conv", "k_conv", "v_conv", "A_log", "dt_bias"), _VECTOR),
    **dict.fromkeys(("query", "weight"), _VECTOR),  # residual queries and weights
    # The vision tower: pixels and positions come in as tokens do.
    "qkv": _JOINT_HEADS,
    **dict.fromkeys(("project_in", "project_out"), _MATRIX),
    **dict.fromkeys(("patch", "position"), _TABLE),
    **dict.fromkeys(("attention_norm", "mlp_norm"), _VECTOR),
}


def rules(params: Any, optimizer: config.Optimizer) -> Any:
    """The rule of every parameter, as a tree like `params`.

    Raises:
      ValueError: a parameter whose name is not in the table.
    """

    def rule(path: Any, _: Any) -> Rule:
        name = path_name(path).rsplit("/", 1)[-1]
        if name not in RULES:
            raise ValueError(
                f"parameter {path_name(path)!r} has no optimizer rule; add {name!r} to "
                "RULES in kimi_jax/train/optimizer.py"
            )
        found = RULES[name]
        if optimizer.kind == "adamw":
            return found._replace(muon=None)
        if found is _HEADS and not optimizer.muon_per_head:
            return _TO_HEADS
        return found

    return jax.tree_util.tree_map_with_path(rule, params)


def rule_rows(
    params: Mapping[str, Any], optimizer: config.Optimizer
) -> list[tuple[str, str, str, str]]:
    """Which parameter is updated how, for printing; equal layers share a row.

    Args:
      params: canonical names and arrays, or shapes.
    """
    rows = set()
    for name, rule in rules(params, optimizer).items():
        pattern = re.sub(r"(layer|block)_\d+", r"\1_*", name)
        decay = f"{optimizer.weight_decay:g}" if rule.decay else "none"
        if rule.muon is None:
            rows.add((pattern, "adamw", "-", decay))
            continue
        shape = params[name].shape
        m, n = sides(shape, rule.muon)
        count = math.prod(shape) // (m * n)
        rows.add((pattern, "muon", f"{count} x [{m}, {n}]", decay))
    head = ("parameter", "updated by", "matrices a layer", "weight decay")
    # Muon first, then AdamW with decay and without.
    return [head, *sorted(rows, key=lambda row: (row[1] != "muon", row[3], row[0]))]


def schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up, then down to `final_fraction` of the peak after `steps`.

    "cosine" falls all the way. "wsd" (warm-up, stable, decay; MiniCPM, arXiv
    2404.06395) stays at the peak and falls over the last `decay_fraction` of the steps:
    linearly, or as 1 - sqrt(share of the decay), which falls fast at first and ended
    lower where both were compared (Haegele et al., arXiv 2405.18392).
    """
    peak, final = optimizer.learning_rate, optimizer.final_fraction
    warmup = max(1, round(optimizer.warmup_fraction * steps))
    fall = max(1, round(optimizer.decay_fraction * steps))

    def stable_decay(step: jax.Array) -> jax.Array:
        share = jnp.clip((step + warmup - (steps - fall)) / fall, 0.0, 1.0)
        gone = share if optimizer.decay_shape == "linear" else jnp.sqrt(share)
        return peak * (1.0 - (1.0 - final) * gone)

    cosine = optax.cosine_decay_schedule(peak, max(1, steps - warmup), final)
    # The first update already moves: step 0 uses peak / warmup.
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    rest = cosine if optimizer.schedule == "cosine" else stable_decay
    return optax.join_schedules([ramp, rest], [warmup])


def make(
    optimizer: config.Optimizer, steps: int, params: Any
) -> optax.GradientTransformation:
    """Clipping, Muon or AdamW by the table, decoupled weight decay, learning rate."""
    table = rules(params, optimizer)
    is_rule = lambda node: isinstance(node, Rule)  # noqa: E731
    labels = jax.tree.map(
        lambda r: "muon" if r.muon else "adamw", table, is_leaf=is_rule
    )
    dimensions = jax.tree.map(
        lambda r: r.muon if r.muon else optax.MaskedNode(), table, is_leaf=is_rule
    )
    decay = jax.tree.map(lambda r: r.decay, table, is_leaf=is_rule)
    # None keeps the dtype of the parameter, which is float32.
    narrow = {"bfloat16": jnp.bfloat16, "float32": None}
    momentum_dtype = narrow[optimizer.momentum_dtype]
    muon = optax.chain(
        scale_by_muon(
            dimensions,
            momentum=optimizer.muon_momentum,
            momentum_dtype=momentum_dtype,
            dtype=narrow[optimizer.muon_dtype],
        ),
        _scale_to_rms(dimensions, optimizer.muon_update_rms),
    )
    adam = optax.scale_by_adam(
        optimizer.adam_b1,
        optimizer.adam_b2,
        optimizer.adam_eps,
        mu_dtype=momentum_dtype,
    )
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.partition({"muon": muon, "adamw": adam}, labels),
        optax.add_decayed_weights(optimizer.weight_decay, decay),
        optax.scale_by_learning_rate(schedule(optimizer, steps)),
    )


def _scale_to_rms(dimensions: Any, rms: float) -> optax.GradientTransformation:
    """Scale an orthogonal [m, n] update, of RMS 1/sqrt(max(m, n)), to `rms`.

    With the RMS that AdamW's updates have, both share one learning rate and weight
    decay (Moonlight report, arXiv 2502.16982, Sec. 2.2).
    """

    def scale(update: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
        return update * (rms * math.sqrt(max(sides(update.shape, axes))))

    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates, dimensions))
