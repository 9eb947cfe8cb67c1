"""Muon for matrices, AdamW for the rest, from one table (Kimi K3 report Sec. 2.5).

Each parameter name stands in the table once, with the axes that Muon orthogonalises
and whether weight decay applies. All other axes of a Muon parameter are batch axes:
scan stacks, experts, and the heads of q, k and v. So "per head" is a choice of axes,
and with heads sharded it needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from kimi_jax import config
from kimi_jax.canonical import path_name


class Rule(NamedTuple):
    """How a parameter is updated; axes count from the end, past any stack."""

    muon: MuonDimensionNumbers | None  # None: AdamW
    decay: bool


_MATRIX = Rule(MuonDimensionNumbers(-2, -1), decay=True)  # [in, out], [E, in, out]
_HEADS = Rule(MuonDimensionNumbers(-3, -1), decay=True)  # [in, H, out], each head alone
_FROM_HEADS = Rule(MuonDimensionNumbers((-3, -2), -1), decay=True)  # [H, in, out]
_TO_HEADS = Rule(MuonDimensionNumbers(-3, (-2, -1)), decay=True)  # [in, H, out], whole
_TABLE = Rule(None, decay=True)  # lookup tables, which have no input to balance
_VECTOR = Rule(None, decay=False)

RULES: dict[str, Rule] = {
    # Queries, keys and values: one orthogonalisation a head. kv_b keeps the key and
    # value rows of a head together.
    **dict.fromkeys(("q", "k", "v", "q_b", "kv_b"), _HEADS),
    **dict.fromkeys(("f_b", "g", "g_b"), _TO_HEADS),
    "o": _FROM_HEADS,
    **dict.fromkeys(("q_a", "kv_a", "f_a", "g_a", "beta"), _MATRIX),
    **dict.fromkeys(("gate", "up", "down", "router"), _MATRIX),
    **dict.fromkeys(("latent_down", "latent_up"), _MATRIX),
    **dict.fromkeys(("experts_gate", "experts_up", "experts_down"), _MATRIX),
    **dict.fromkeys(("embed", "unembed"), _TABLE),
    **dict.fromkeys(("norm", "o_norm", "latent_norm"), _VECTOR),
    **dict.fromkeys(("q_a_norm", "kv_a_norm", "gain"), _VECTOR),
    **dict.fromkeys(("q_conv", "k_conv", "v_conv", "A_log", "dt_bias"), _VECTOR),
    **dict.fromkeys(("query", "weight"), _VECTOR),  # residual queries and weights
}

# Muon's update has this root mean square, AdamW's usual one, so that both share one
# learning rate and weight decay (Moonlight report, Sec. 2.2).
_UPDATE_RMS = 0.2

# Coefficients of each Newton-Schulz step: optax's default, written as a sequence, which
# optax runs as a scan. Unrolled, they would be most of the program to compile.
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


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


def schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine down to `final_fraction` of the peak."""
    peak = optimizer.learning_rate
    warmup = max(1, round(optimizer.warmup_fraction * steps))
    cosine = optax.cosine_decay_schedule(
        peak, max(1, steps - warmup), optimizer.final_fraction
    )
    # The first update already moves: step 0 uses peak / warmup.
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([ramp, cosine], [warmup])


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
    muon = optax.chain(
        scale_by_muon(
            ns_coeffs=_NEWTON_SCHULZ,
            beta=optimizer.muon_momentum,
            weight_dimension_numbers=dimensions,
        ),
        _match_adam_rms(dimensions),
    )
    adam = optax.scale_by_adam(optimizer.adam_b1, optimizer.adam_b2, optimizer.adam_eps)
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.partition({"muon": muon, "adamw": adam}, labels),
        optax.add_decayed_weights(optimizer.weight_decay, decay),
        optax.scale_by_learning_rate(schedule(optimizer, steps)),
    )


def _match_adam_rms(dimensions: Any) -> optax.GradientTransformation:
    """Scale an orthogonal [m, n] update, of RMS 1/sqrt(max(m, n)), to `_UPDATE_RMS`."""

    def scale(update: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
        sides = [math.prod(update.shape[i] for i in _axes(a)) for a in axes]
        return update * (_UPDATE_RMS * math.sqrt(max(sides)))

    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates, dimensions))


def _axes(axis: int | Sequence[int]) -> Sequence[int]:
    return (axis,) if isinstance(axis, int) else axis
