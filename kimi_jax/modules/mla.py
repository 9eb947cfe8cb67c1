"""Gated multi-head latent attention, without positions by default (K3 report Eq. 7)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.modules.attend import (
    absorbed_latent,
    attend,
    attend_cached,
    attend_carried,
    rotated,
    split_latent,
)
from kimi_jax.modules.cache import Chunk, Segment
from kimi_jax.ops.norms import rms_norm

_NAMES = ("latent", "pe")  # of what is remembered


class MultiHeadLatentAttention(nn.Module):
    """x_BTD -> y_BTD. Keys and values come from one latent of `kv_rank` values a token.

    `pe_dim` further key channels are shared by all heads. They are rotated only with
    `positions="rope"`; the released models leave them unrotated.
    """

    model: config.Model

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        chunk: Chunk | Segment | None = None,
    ) -> jax.Array:
        cfg, D = self.model.mla, self.model.width
        H, V, nope, pe = cfg.num_heads, cfg.value_dim, cfg.nope_dim, cfg.pe_dim
        q_BTHK = self._queries(x_BTD)
        c_BTR = x_BTD @ self._matrix("kv_a", (D, cfg.kv_rank + pe))
        latent_BTR, k_pe_BTR = jnp.split(c_BTR, [cfg.kv_rank], axis=-1)
        kv_norm = parameters.gain(self, "kv_a_norm", cfg.kv_rank)
        latent_BTR = rms_norm(latent_BTR, kv_norm, cfg.latent_norm_eps)
        k_pe_BTGK = k_pe_BTR[:, :, None]
        if cfg.positions == "rope":
            q_nope_BTHK, q_pe_BTHK = jnp.split(q_BTHK, [nope], axis=-1)
            q_pe_BTHK, k_pe_BTGK = rotated(
                q_pe_BTHK, k_pe_BTGK, segment_ids_BT, chunk, cfg.rope_base
            )
            q_BTHK = jnp.concatenate([q_nope_BTHK, q_pe_BTHK], axis=-1)
        kv_b_RHK = self._matrix("kv_b", (cfg.kv_rank, H, nope + V))
        latents = (latent_BTR, k_pe_BTGK)
        if isinstance(chunk, Chunk):
            o_BTHV = self._attend_cached(q_BTHK, latents, kv_b_RHK, chunk)
        else:
            run: Callable[..., jax.Array] = attend
            if chunk is not None:
                run = functools.partial(attend_carried, names=_NAMES, segment=chunk)
            time = "time" if chunk is None else None
            o_BTHV = run(
                self,
                q_BTHK,
                latents,
                functools.partial(split_latent, nope=nope),
                (kv_b_RHK,),
                latent_axes=(("rows", time, None), ("rows", time, None, None)),
                weight_axes=((None, "heads", None),),
                scale=(nope + pe) ** -0.5,
                segment_ids_BT=segment_ids_BT,
                block_size=cfg.block_size,
            )
        if cfg.output_gate:
            gate_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, self._matrix("g", (D, H, V)))
            o_BTHV = o_BTHV * nn.sigmoid(gate_BTHV.astype(o_BTHV.dtype))
        o_HVD = self._matrix("o", (H, V, D))
        return jnp.einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), o_HVD)

    def _attend_cached(
        self,
        q_BTHK: jax.Array,
        latents: tuple[jax.Array, jax.Array],
        kv_b_RHK: jax.Array,
        chunk: Chunk,
    ) -> jax.Array:
        """Attention to the cache, whose latents are expanded, or read as they are.

        Nothing between latent and score depends on the position, so W_UK may be applied
        to the query instead of every key, and W_UV to the sum: the absorbed form. It
        reads `kv_rank + pe_dim` values a token whatever the number of heads, and pays
        with longer dot products, which is right for few queries.
        """
        cfg, T = self.model.mla, q_BTHK.shape[1]
        nope, pe, V, R = cfg.nope_dim, cfg.pe_dim, cfg.value_dim, cfg.kv_rank
        run = functools.partial(
            attend_cached,
            self,
            names=_NAMES,
            chunk=chunk,
            latent_axes=(("rows", None, None), ("rows", None, None, None)),
            scale=(nope + pe) ** -0.5,
            block_size=cfg.block_size,
        )
        # Multiplications for a head and a token of the past.
        if T * (nope + pe + V) + R * (nope + V) < T * (2 * R + pe):
            expand = functools.partial(split_latent, nope=nope)
            axes = ((None, "heads", None),)
            return run(q_BTHK, latents, expand, (kv_b_RHK,), weight_axes=axes)
        q_nope_BTHK, q_pe_BTHK = jnp.split(q_BTHK, [nope], axis=-1)
        k_RHK, v_RHV = jnp.split(kv_b_RHK, [nope], axis=-1)
        q_BTHR = jnp.einsum("bthk,rhk->bthr", q_nope_BTHK, k_RHK)
        q_BTHX = jnp.concatenate([q_BTHR, q_pe_BTHK], axis=-1)
        o_BTHR = run(q_BTHX, latents, absorbed_latent)
        # The sum over tokens was float32 or wider, and is rounded once, after W_UV.
        wide = o_BTHR.dtype
        return jnp.einsum("bthr,rhv->bthv", o_BTHR, v_RHV.astype(wide))

    def _matrix(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return parameters.matrix(
            self, name, shape, self.model.init_std, self.model.dtype
        )

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        cfg = self.model.mla
        heads = (cfg.num_heads, cfg.nope_dim + cfg.pe_dim)
        if cfg.q_rank is None:
            q_DHK = self._matrix("q", (self.model.width, *heads))
            return jnp.einsum("btd,dhk->bthk", x_BTD, q_DHK)
        q_BTR = x_BTD @ self._matrix("q_a", (self.model.width, cfg.q_rank))
        norm = parameters.gain(self, "q_a_norm", cfg.q_rank)
        q_BTR = rms_norm(q_BTR, norm, cfg.latent_norm_eps)
        return jnp.einsum(
            "btr,rhk->bthk", q_BTR, self._matrix("q_b", (cfg.q_rank, *heads))
        )
