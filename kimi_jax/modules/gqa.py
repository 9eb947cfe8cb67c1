"""Grouped-query softmax attention: the plain baseline for the hybrid's layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.modules.attend import attend, attend_cached, keys_and_values
from kimi_jax.modules.cache import Chunk
from kimi_jax.ops.rotary import rotate_pair, rotate_pair_from


class GroupedQueryAttention(nn.Module):
    """x_BTD -> y_BTD. `num_heads` queries share `num_kv_heads` keys and values."""

    model: config.Model

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        chunk: Chunk | None = None,
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
            if chunk is None:
                pair = rotate_pair(q_BTHK, k_BTGK, segment_ids_BT, cfg.rope_base)
            else:
                start_B = chunk.where.start_B
                pair = rotate_pair_from(q_BTHK, k_BTGK, start_B, cfg.rope_base)
            q_BTHK, k_BTGK = pair
        inputs = (q_BTHK, (k_BTGK, v_BTGK), keys_and_values)
        options = {"scale": K**-0.5, "block_size": cfg.block_size}
        if chunk is None:
            o_BTHK = attend(
                self,
                *inputs,
                latent_axes=(("rows", "time", "heads", None),) * 2,
                segment_ids_BT=segment_ids_BT,
                **options,
            )
        else:
            o_BTHK = attend_cached(
                self,
                *inputs,
                names="kv",
                chunk=chunk,
                latent_axes=(("rows", None, "heads", None),) * 2,
                **options,
            )
        o_HKD = parameters.matrix(self, "o", (H, K, D), model.init_std, model.dtype)
        return jnp.einsum("bthk,hkd->btd", o_BTHK.astype(x_BTD.dtype), o_HKD)
