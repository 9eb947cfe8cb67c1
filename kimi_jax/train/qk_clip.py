"""QK-Clip: shrink queries and keys of heads whose attention logits grow too large.

Kimi K2 report (arXiv 2507.20534), Sec. 2.1 and Algorithm 1. After the optimizer's
update, a head whose largest logit m of the step exceeds tau has its logits multiplied
by gamma = tau / m, through its weights; every other head keeps its bits. Logits are
bilinear, so which factors carry gamma is a choice:

    what only this head reads                   half each: sqrt(gamma)
    against a key that heads share              all of it on the query: gamma
    the shared key                              untouched, other heads read it

For MLA these are the `nope` channels of queries and keys, the `pe` channels of the
query, and the `pe` key. Rotation does not mix channels with other factors, so it is the
same with and without positions (K3 has none). The query's factor is on the last
matrix before the heads, `q_b` after the low-rank norm or `q` without one, and the key's
on its rows of `kv_b`, past the latent's norm; the value rows stay. In grouped-query
attention all keys are shared, so `q` alone is scaled.

The momentum is not scaled. K2 trained with tau = 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from kimi_jax.config import MLA, Model

STATISTIC = "/max_logit_H"  # ends the names of the statistics that `clip` takes


def clip(
    model: Model, params: Any, max_logits: Mapping[str, jax.Array], tau: float
) -> Any:
    """`params` with the heads above `tau` scaled down.

    Args:
      params: stacked or canonical tree.
      max_logits: {path of the layer + STATISTIC: [..., H]}, the largest logit of each
        head over the whole batch of the step. Leading axes are those of the parameters.
      tau: the largest logit allowed, positive.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    for name, max_logit_H in max_logits.items():
        layer = name.removesuffix(STATISTIC)
        # Exactly 1 where nothing is to do, also without a token (-inf).
        gamma_H = jnp.where(max_logit_H > tau, tau / max_logit_H, 1.0)
        mla = model.mla if layer.endswith("/mla") else None
        for matrix, factor_HK in _factors(mla, gamma_H).items():
            w_RHK = flat[f"{layer}/{matrix}"]
            factor_1HK = jnp.expand_dims(factor_HK, -3)
            flat[f"{layer}/{matrix}"] = w_RHK * factor_1HK.astype(w_RHK.dtype)
    return traverse_util.unflatten_dict(flat, sep="/")


def summary(max_logits: Mapping[str, jax.Array], tau: float) -> dict[str, jax.Array]:
    """The largest logit of the model, and how many heads were scaled down."""
    logits_N = jnp.concatenate([x.ravel() for x in max_logits.values()])
    return {
        "qk_clip/max_logit": jnp.max(logits_N),
        "qk_clip/heads": jnp.sum(logits_N > tau).astype(jnp.float32),
    }


def _factors(mla: MLA | None, gamma_H: jax.Array) -> dict[str, jax.Array]:
    """{matrix: factor [..., H, K or 1]} of one layer; mla None: grouped-query."""
    gamma_H1 = gamma_H[..., None]
    if mla is None:
        return {"q": gamma_H1}
    own_HK = jnp.repeat(jnp.sqrt(gamma_H1), mla.nope_dim, axis=-1)
    shared_HK = jnp.repeat(gamma_H1, mla.pe_dim, axis=-1)
    value_HV = jnp.repeat(jnp.ones_like(gamma_H1), mla.value_dim, axis=-1)
    return {
        "q" if mla.q_rank is None else "q_b": jnp.concatenate([own_HK, shared_HK], -1),
        "kv_b": jnp.concatenate([own_HK, value_HV], -1),
    }
