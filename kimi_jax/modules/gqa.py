"""Grouped-query softmax attention: the plain baseline for the hybrid's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.modules.attend import (
    attend,
    attend_cached,
    attend_carried,
    keys_and_values,
    rotated,
)
from kimi_jax.modules.cache import Chunk, Segment


class GroupedQueryAttention(nn.Module):
    """x_BTD -> y_BTD. `num_heads` queries share `num_kv_heads` keys and values."""

    model: config.Model

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        chunk: Chunk | Segment | None = None,
    ) -> jax.Array:
        cfg, model = self.model.gqa, self.model
        D, H, G, K = model.width, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

        def project(name: str, heads: int) -> jax.Array:
            w_DHK = parameters.matrix(
                self, name, (D, heads, K), model.init_std, model.dtype
            )
            return jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK)

        q_BTHK, k_BTGK, v_BTGK = project("q", H), project("k", G), project("v", G)
        if cfg.positions == "rope":
            q_BTHK, k_BTGK = rotated(
                q_BTHK, k_BTGK, segment_ids_BT, chunk, cfg.rope_base
            )
        time = "time" if chunk is None else None
        heads = ("rows", time, "heads", None)
        run: Callable[..., jax.Array] = attend
        if isinstance(chunk, Chunk):
            run = functools.partial(attend_cached, names="kv", chunk=chunk)
        elif chunk is not None:
            run = functools.partial(attend_carried, names="kv", segment=chunk)
        masks = {} if isinstance(chunk, Chunk) else {"segment_ids_BT": segment_ids_BT}
        o_BTHK = run(
            self,
            q_BTHK,
            (k_BTGK, v_BTGK),
            keys_and_values,
            latent_axes=(heads, heads),
            scale=K**-0.5,
            block_size=cfg.block_size,
            **masks,
        )
        o_HKD = parameters.matrix(self, "o", (H, K, D), model.init_std, model.dtype)
        return jnp.einsum("bthk,hkd->btd", o_BTHK.astype(x_BTD.dtype), o_HKD)
