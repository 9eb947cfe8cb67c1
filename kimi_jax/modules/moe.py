"""Stable LatentMoE as a layer (Kimi K3 report Eq. 11)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config, sharding
from kimi_jax.modules import islands, parameters
from kimi_jax.modules.mlp import MLP, activation
from kimi_jax.ops import balancing
from kimi_jax.ops import dispatch as dispatch_lib
from kimi_jax.ops.dispatch import Options, dispatch
from kimi_jax.ops.norms import rms_norm
from kimi_jax.ops.routing import (
    Routing,
    agreement,
    dropped,
    replay,
    route_threshold,
    route_top_k,
    router_scores,
)

# A caller asks for each token's experts by making this collection mutable.
ROUTES = "routes"
# And gives it experts to use instead of its own choice in this one.
REPLAY = "replay"


class LatentMoE(nn.Module):
    """x_BTD -> y_BTD: shared experts on x plus routed experts in a narrower latent.

    One projection into the latent before dispatch and one out of it after the combine
    are shared by all experts; the norm between combine and out-projection is what keeps
    the chain of four matrices stable.
    """

    model: config.Model

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        infer: bool = False,
    ) -> jax.Array:
        """`infer`: no slot is dropped, so that a row cannot feel the others."""
        moe, D = self.model.moe, self.model.width
        z_BTL = x_BTD
        if moe.latent_width is not None:
            z_BTL = x_BTD @ self._matrix("latent_down", (D, moe.latent_width))
        u_BTL = self._routed(
            z_BTL, x_BTD if moe.router_input == "full" else z_BTL, segment_ids_BT, infer
        )
        if moe.latent_norm:
            gain_L = parameters.gain(self, "latent_norm", z_BTL.shape[-1])
            u_BTL = rms_norm(u_BTL, gain_L, self.model.norm_eps)
        if moe.latent_width is not None:
            u_BTL = u_BTL @ self._matrix("latent_up", (moe.latent_width, D))
        y_BTD = u_BTL.astype(x_BTD.dtype)
        if moe.num_shared:
            # Equal widths and an elementwise activation make one MLP of all of them.
            hidden = moe.num_shared * moe.expert_width
            shared = MLP(self.model, hidden, name="shared")
            y_BTD += shared(x_BTD, segment_ids_BT)
        return y_BTD

    def _routed(
        self,
        z_BTL: jax.Array,
        r_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        infer: bool,
    ) -> jax.Array:
        """The routed experts' u_BTL; sows what balancing needs to know.

        Every device routes the tokens that it holds, and sends them to the devices
        that hold their experts.
        """
        moe, L = self.model.moe, z_BTL.shape[-1]
        E, F = moe.num_experts, moe.expert_width
        shape = (r_BTD.shape[-1], E)
        observing = parameters.observing(self)
        given_BTA: jax.Array | None = None
        if self.has_variable(REPLAY, "routes_BTA"):
            given_BTA = self.get_variable(REPLAY, "routes_BTA")
        zeros = nn.initializers.zeros
        time = None if infer else "time"
        tokens = ("rows", time, None)
        u_BTL, routes_BTA, observed = islands.island(
            functools.partial(_route_and_compute, self.model, observing, infer),
            z_BTL,
            r_BTD,
            segment_ids_BT,
            given_BTA,
            self.param("router", parameters.fan_in_uniform, shape),
            self.variable("balance", "bias", zeros, None, (E,)).value,
            self._matrix("experts_gate", (E, L, F)),
            self._matrix("experts_up", (E, L, F)),
            self._matrix("experts_down", (E, F, L)),
            inputs=(
                tokens,
                tokens,
                None if segment_ids_BT is None else ("rows", time),
                None if given_BTA is None else tokens,
                (None, None),
                (None,),
                ("experts", None, "hidden"),
                ("experts", None, "hidden"),
                ("experts", "hidden", None),
            ),
            outputs=(
                tokens,
                tokens,
                _observed_axes(
                    moe.balancing.method, observing, replaying=given_BTA is not None
                ),
            ),
            # The ranks of a context axis that share their tokens could not prove it.
            check=not infer,
        )
        parameters.sow_stats(self, observed)
        if self.is_mutable_collection(ROUTES):
            self.sow(ROUTES, "routes_BTA", routes_BTA, lambda _, x: x, lambda: None)
        return u_BTL

    def _matrix(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return parameters.matrix(
            self, name, shape, self.model.init_std, self.model.dtype
        )


def _route_and_compute(
    model: config.Model,
    observing: bool,
    infer: bool,
    z_BTL: jax.Array,
    r_BTD: jax.Array,
    segment_ids_BT: jax.Array | None,
    given_BTA: jax.Array | None,
    router_DE: jax.Array,
    bias_E: jax.Array,
    *experts: jax.Array,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """u_BTL and the experts of this device's tokens, what was observed of all tokens.

    The experts are those of `given_BTA` where it names some. With `infer` the ranks of
    a context axis are given the same tokens, and each does its share of them.
    """
    moe = model.moe
    z_NL, r_ND = (x.reshape(-1, x.shape[-1]) for x in (z_BTL, r_BTD))
    mask_N = None if segment_ids_BT is None else segment_ids_BT.reshape(-1) > 0
    share = None
    if infer and mask_N is not None and (share := islands.axis_if_split("context")):
        z_NL, r_ND, mask_N = (_own_share(x, share) for x in (z_NL, r_ND, mask_N))
    scores_NE = router_scores(r_ND, router_DE)
    routing, agreed = _route(moe, scores_NE, bias_E, mask_N), {}
    if given_BTA is not None:
        given_NA = given_BTA.reshape(-1, given_BTA.shape[-1])
        agreed = agreement(routing, given_NA, moe.num_experts)
        routing = replay(routing, scores_NE, given_NA, scale=moe.routed_scaling)
    gate_ELF, up_ELF, down_EFL = experts
    made = dispatch(
        z_NL,
        routing.experts_NA,
        routing.weights_NA,
        gate_ELF,
        up_ELF,
        down_EFL,
        activation(model.ffn),
        _options(moe, infer),
    )
    observed: dict[str, jax.Array] = {}
    if observing:
        method = moe.balancing
        axes = () if sharding.context_mesh() is None else sharding.TOKENS
        undone = dropped(routing, moe.num_experts) | agreed
        undone["dropped_slots"] += made.dropped
        hidden_max = jax.lax.stop_gradient(made.hidden_max)
        if axes:
            undone = jax.lax.psum(undone, axes)
            hidden_max = jax.lax.pmax(hidden_max, axes)
        observed = balancing.observe(
            method.method, routing, scores_NE, bias_E, bins=method.bins, axes=axes
        )
        observed |= {**undone, "hidden_max": hidden_max}
    found = [made.y_NL, routing.experts_NA]
    if share is not None:
        found = [jax.lax.all_gather(x, share, tiled=True) for x in found]
    (B, T), N = z_BTL.shape[:2], z_BTL[..., 0].size
    u_BTL, routes_BTA = (x[:N].reshape(B, T, -1) for x in found)
    return u_BTL, routes_BTA, observed


def _own_share(x_N: jax.Array, axis: str) -> jax.Array:
    """The part of N tokens, the same ones along `axis`, that this rank works on."""
    ranks, N = jax.lax.axis_size(axis), len(x_N)
    x_N = jnp.pad(x_N, [(0, -N % ranks)] + [(0, 0)] * (x_N.ndim - 1))
    size = len(x_N) // ranks
    return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(axis) * size, size)


def _route(
    moe: config.MoE, scores_NE: jax.Array, bias_E: jax.Array, mask_N: Any
) -> Routing:
    balance, scale = moe.balancing, moe.routed_scaling
    if balance.method == "quantile_threshold":
        cap = balance.threshold_cap
        return route_threshold(scores_NE, bias_E, cap=cap, scale=scale, mask_N=mask_N)
    active = moe.num_active
    return route_top_k(scores_NE, bias_E, active=active, scale=scale, mask_N=mask_N)


def choose(moe: config.MoE, tokens: int) -> tuple[str, str]:
    """How a device multiplies by its experts, and why.

    Under the mesh that is set (`jax.set_mesh`), as for the layer itself.

    Args:
      tokens: of a micro-batch, over all devices.
    """
    mesh = sharding.context_mesh()
    sizes: Mapping[str, int] = {} if mesh is None else mesh.shape
    devices, owners = (
        math.prod(sizes.get(axis, 1) for axis in axes)
        for axes in (sharding.TOKENS, sharding.EXPERTS)
    )
    threshold = moe.balancing.method == "quantile_threshold"
    active = moe.balancing.threshold_cap if threshold else moe.num_active
    slots = tokens * active // devices
    return dispatch_lib.choose(
        _options(moe, infer=False), slots, moe.num_experts // owners
    )


def _options(moe: config.MoE, infer: bool) -> Options:
    mesh = sharding.context_mesh()
    if infer:
        # Room for all slots of all devices on one: nothing is ever dropped.
        devices = (
            1 if mesh is None else math.prod(mesh.shape[a] for a in sharding.EXPERTS)
        )
        moe = dataclasses.replace(
            moe,
            dispatch="ragged",
            capacity_factor=float(devices),
            implementation=None
            if moe.implementation == "padded"
            else moe.implementation,
        )
    return Options(
        moe.dispatch,
        None if mesh is None else sharding.EXPERTS,
        None if mesh is None else "tensor",
        moe.capacity_factor,
        moe.implementation,
        platform=None if mesh is None else sharding.platform(mesh),
    )


def _observed_axes(
    method: str, observing: bool, replaying: bool
) -> dict[str, sharding.Axes]:
    """How the observations lie: margins with their tokens, all else on every device."""
    if not observing:
        return {}
    names = [*balancing.observed_names(method), "dropped_slots", "unrouted_tokens"]
    if replaying:
        names += ["replayed_slots", "agreed_slots"]
    axes: dict[str, sharding.Axes] = dict.fromkeys([*names, "hidden_max"], ())
    if "margin_NE" in axes:
        axes["margin_NE"] = ("tokens", None)
    return axes
