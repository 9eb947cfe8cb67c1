"""Kimi Delta Attention as a layer (Kimi K3 report Sec. 2.1, Eq. 1, 5, 6)."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.ops import decay
from kimi_jax.ops.conv import short_conv
from kimi_jax.ops.norms import gated_rms_norm
from pallas_kernels.kda import kda


class KimiDeltaAttention(nn.Module):
    """x_BTD -> y_BTD. Owns projections and gates; `pallas_kernels.kda` mixes tokens.

    Heads stay an axis of their own in every matrix ([D, H, K]), so that Muon can treat
    each head alone and heads can be sharded.
    """

    model: config.Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        cfg, model = self.model.kda, self.model
        H, K, V = cfg.num_heads, cfg.key_dim, cfg.value_dim
        q_BTHK = self._qkv("q", x_BTD, K, segment_ids_BT)
        k_BTHK = self._qkv("k", x_BTD, K, segment_ids_BT)
        v_BTHV = self._qkv("v", x_BTD, V, segment_ids_BT)
        beta_BTH = jnp.einsum(
            "btd,dh->bth", x_BTD, self._matrix("beta", (model.width, H))
        )
        a_log_H, dt_bias_HK, g_BTHK = self._decay(x_BTD)
        lower_bound = cfg.gate_lower_bound if cfg.gate == "bounded" else None
        o_BTHV, state_BHKV = kda(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            g_BTHK,
            beta_BTH,
            A_log=a_log_H,
            dt_bias=dt_bias_HK.reshape(H * K),
            lower_bound=lower_bound,
            segment_ids=segment_ids_BT,
            output_final_state=parameters.observing(self),
            use_gate_in_kernel=True,
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            chunk_size=cfg.chunk_size,
            implementation=cfg.implementation,
        )
        if state_BHKV is not None:
            observed = decay.observe(
                g_BTHK,
                beta_BTH,
                state_BHKV,
                segment_ids_BT,
                a_log_H=a_log_H,
                dt_bias=dt_bias_HK.reshape(H * K),
                lower_bound=lower_bound,
            )
            parameters.sow_stats(self, observed)
        o_BTHV = gated_rms_norm(
            o_BTHV,
            self._output_gate(x_BTD),
            parameters.gain(self, "o_norm", V),
            model.norm_eps,
        )
        o_HVD = self._matrix("o", (H, V, model.width))
        return jnp.einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), o_HVD)

    def _matrix(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return parameters.matrix(
            self, name, shape, self.model.init_std, self.model.dtype
        )

    def _qkv(
        self, name: str, x_BTD: jax.Array, size: int, segment_ids_BT: jax.Array | None
    ) -> jax.Array:
        cfg = self.model.kda
        w_DHK = self._matrix(name, (self.model.width, cfg.num_heads, size))
        y_BTHK = jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK)
        if cfg.conv_width is not None:
            shape = (cfg.num_heads, size, cfg.conv_width)
            w_HKW = self.param(f"{name}_conv", parameters.conv_uniform, shape)
            conv = short_conv(y_BTHK, w_HKW.astype(y_BTHK.dtype), segment_ids_BT)
            y_BTHK = cast(jax.Array, conv)  # no tail was asked for
        return nn.silu(y_BTHK)

    def _decay(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`A_log` [H], `dt_bias` [H, K] and the gate's input [B, T, H, K]."""
        cfg, D = self.model.kda, self.model.width
        H, K = cfg.num_heads, cfg.key_dim
        per_head = 1 if cfg.gate_granularity == "head" else K
        f_DR = self._matrix("f_a", (D, cfg.gate_rank))
        f_RHK = self._matrix("f_b", (cfg.gate_rank, H, per_head))
        g_BTHK = jnp.einsum("btr,rhk->bthk", x_BTD @ f_DR, f_RHK)
        bounded = cfg.gate == "bounded"
        init = nn.initializers.zeros if bounded else parameters.log_uniform_decay
        a_log_H = self.param("A_log", init, (H,), jnp.float32)
        dt_bias = self.param("dt_bias", parameters.inverse_softplus_dt, (H, per_head))
        shape = (*g_BTHK.shape[:-1], K)
        return (
            a_log_H,
            jnp.broadcast_to(dt_bias, (H, K)),
            jnp.broadcast_to(g_BTHK, shape),
        )

    def _output_gate(self, x_BTD: jax.Array) -> jax.Array | None:
        cfg, D = self.model.kda, self.model.width
        H, V = cfg.num_heads, cfg.value_dim
        if cfg.output_gate == "full":
            return jnp.einsum("btd,dhv->bthv", x_BTD, self._matrix("g", (D, H, V)))
        if cfg.output_gate == "low_rank":
            g_DR = self._matrix("g_a", (D, cfg.gate_rank))
            g_RHV = self._matrix("g_b", (cfg.gate_rank, H, V))
            return jnp.einsum("btr,rhv->bthv", x_BTD @ g_DR, g_RHV)
        return None
