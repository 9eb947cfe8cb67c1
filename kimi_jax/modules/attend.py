"""Softmax attention as the layers call it: with its largest logits, where asked for."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from kimi_jax.modules import parameters
from kimi_jax.ops.attention import attention, attention_with_max_logits

# A caller asks by making this collection mutable; nothing is kept in it. It is a
# question to the layers and no field of the model, which it does not change.
MAX_LOGITS = "max_logits"


def attend(
    module: nn.Module,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGV: jax.Array,
    **options: Any,
) -> jax.Array:
    """`attention` with its options; sows the statistic max_logit_H if asked to."""
    if not module.is_mutable_collection(MAX_LOGITS):
        return attention(q_BTHK, k_BTGK, v_BTGV, **options)
    o_BTHV, max_logit_H = attention_with_max_logits(q_BTHK, k_BTGK, v_BTGV, **options)
    parameters.sow_stat(module, "max_logit_H", max_logit_H)
    return o_BTHV
