"""Stable LatentMoE as a layer (Kimi K3 report Eq. 11)."""

from __future__ import annotations

import jax
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.modules.mlp import MLP, activation
from kimi_jax.ops import balancing
from kimi_jax.ops.experts import experts
from kimi_jax.ops.norms import rms_norm
from kimi_jax.ops.routing import (
    Routing,
    dropped,
    route_threshold,
    route_top_k,
    router_scores,
)


class LatentMoE(nn.Module):
    """x_BTD -> y_BTD: shared experts on x plus routed experts in a narrower latent.

    One projection into the latent before dispatch and one out of it after the combine
    are shared by all experts; the norm between combine and out-projection is what keeps
    the chain of four matrices stable.
    """

    model: config.Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        moe, D = self.model.moe, self.model.width
        x_ND = x_BTD.reshape(-1, D)
        mask_N = None if segment_ids_BT is None else segment_ids_BT.reshape(-1) > 0
        z_NL = x_ND
        if moe.latent_width is not None:
            z_NL = x_ND @ self._matrix("latent_down", (D, moe.latent_width))
        routing = self._route(x_ND if moe.router_input == "full" else z_NL, mask_N)
        L, E, F = z_NL.shape[-1], moe.num_experts, moe.expert_width
        u_NL, hidden_max = experts(
            z_NL,
            routing.experts_NA,
            routing.weights_NA,
            self._matrix("experts_gate", (E, L, F)),
            self._matrix("experts_up", (E, L, F)),
            self._matrix("experts_down", (E, F, L)),
            activation(self.model.ffn),
            implementation=moe.implementation,
            with_max=True,
        )
        if parameters.observing(self):
            parameters.sow_stat(self, "hidden_max", hidden_max)
        if moe.latent_norm:
            gain_L = parameters.gain(self, "latent_norm", L)
            u_NL = rms_norm(u_NL, gain_L, self.model.norm_eps)
        if moe.latent_width is not None:
            u_NL = u_NL @ self._matrix("latent_up", (L, D))
        y_BTD = u_NL.reshape(x_BTD.shape).astype(x_BTD.dtype)
        if moe.num_shared:
            # Equal widths and an elementwise activation make one MLP of all of them.
            hidden = moe.num_shared * moe.expert_width
            shared = MLP(self.model, hidden, name="shared")
            y_BTD += shared(x_BTD, segment_ids_BT)
        return y_BTD

    def _route(self, r_ND: jax.Array, mask_N: jax.Array | None) -> Routing:
        """The experts of each token; sows what balancing needs to know of it."""
        moe, balance = self.model.moe, self.model.moe.balancing
        shape = (r_ND.shape[-1], moe.num_experts)
        w_DE = self.param("router", parameters.fan_in_uniform, shape)
        zeros = nn.initializers.zeros
        bias_E = self.variable("balance", "bias", zeros, None, (moe.num_experts,)).value
        scores_NE = router_scores(r_ND, w_DE)
        if balance.method == "quantile_threshold":
            cap = balance.threshold_cap
            routing = route_threshold(
                scores_NE, bias_E, cap=cap, scale=moe.routed_scaling, mask_N=mask_N
            )
        else:
            active = moe.num_active
            routing = route_top_k(
                scores_NE,
                bias_E,
                active=active,
                scale=moe.routed_scaling,
                mask_N=mask_N,
            )
        if parameters.observing(self):
            observed = balancing.observe(
                balance.method, routing, scores_NE, bias_E, bins=balance.bins
            )
            observed |= dropped(routing, moe.num_experts)
            parameters.sow_stats(self, observed)
        return routing

    def _matrix(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return parameters.matrix(
            self, name, shape, self.model.init_std, self.model.dtype
        )
