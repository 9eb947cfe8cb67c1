"""Kimi Delta Attention as a layer (Kimi K3 report Sec. 2.1, Eq. 1, 5, 6)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config, sharding
from kimi_jax.modules import islands, parameters
from kimi_jax.modules.cache import AXES, ENTRY, LEAVING, STATES, Chunk, Segment
from kimi_jax.ops import decay
from kimi_jax.ops.context import from_rank
from kimi_jax.ops.context_conv import context_short_conv
from kimi_jax.ops.context_kda import context_kda
from kimi_jax.ops.conv import short_conv
from kimi_jax.ops.norms import gated_rms_norm
from pallas_kernels.kda import kda, kda_step


class KimiDeltaAttention(nn.Module):
    """x_BTD -> y_BTD. Owns projections and gates; `pallas_kernels.kda` mixes tokens.

    Heads stay an axis of their own in every matrix ([D, H, K]), so that Muon can treat
    each head alone and heads can be sharded.
    """

    model: config.Model

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None,
        chunk: Chunk | Segment | None = None,
    ) -> jax.Array:
        cfg, model = self.model.kda, self.model
        H, K, V = cfg.num_heads, cfg.key_dim, cfg.value_dim
        q_BTHK, k_BTHK, v_BTHV = (
            jnp.einsum("btd,dhk->bthk", x_BTD, self._matrix(name, (model.width, H, n)))
            for name, n in (("q", K), ("k", K), ("v", V))
        )
        convs = self._convs()
        beta_BTH = jnp.einsum(
            "btd,dh->bth", x_BTD, self._matrix("beta", (model.width, H))
        )
        a_log_H, dt_bias_HK, g_BTHK = self._decay(x_BTD)
        inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, a_log_H, dt_bias_HK)
        mix: Callable[..., jax.Array] = self._mix
        if isinstance(chunk, Chunk):
            mix = functools.partial(self._extend, chunk)
        elif chunk is not None:
            mix = functools.partial(self._carry, chunk)
        o_BTHV = mix(inputs, segment_ids_BT, convs)
        o_BTHV = gated_rms_norm(
            o_BTHV,
            self._output_gate(x_BTD),
            parameters.gain(self, "o_norm", V),
            model.norm_eps,
        )
        o_HVD = self._matrix("o", (H, V, model.width))
        return jnp.einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), o_HVD)

    def _mix(
        self,
        inputs: Sequence[jax.Array],
        segment_ids_BT: jax.Array | None,
        convs: Sequence[jax.Array],
    ) -> jax.Array:
        """o_BTHV of whole sequences; sows what is observed of decays and states."""
        cfg = self.model.kda
        observing = parameters.observing(self)
        o_BTHV, square_B = islands.island(
            functools.partial(_mix, cfg, observing),
            *(*inputs, segment_ids_BT, *convs),
            inputs=(
                *_input_axes("time"),
                None if segment_ids_BT is None else ("rows", "time"),
                *(_CONV,) * len(convs),
            ),
            outputs=(("rows", "time", "heads", None), ("rows",)),
        )
        if observing:
            self._observe(inputs, square_B, segment_ids_BT)
        return o_BTHV

    def _observe(
        self,
        inputs: Sequence[jax.Array],
        square_B: jax.Array,
        segment_ids_BT: jax.Array | None,
    ) -> None:
        _, _, _, g_BTHK, beta_BTH, a_log_H, dt_bias_HK = inputs
        observed = decay.observe(
            g_BTHK,
            beta_BTH,
            square_B,
            segment_ids_BT,
            a_log_H=a_log_H,
            dt_bias=dt_bias_HK.reshape(-1),
            lower_bound=_lower_bound(self.model.kda),
        )
        parameters.sow_stats(self, observed)

    def _extend(
        self,
        chunk: Chunk,
        inputs: Sequence[jax.Array],
        segment_ids_BT: jax.Array | None,
        convs: Sequence[jax.Array],
    ) -> jax.Array:
        """o_BTHV of tokens that go on from the states in the cache, which move on."""
        names = _memory(convs)
        stacks: list[jax.Array] = [self.get_variable(STATES, name) for name in names]
        before = [x[chunk.at] for x in stacks]
        o_BTHV, *moved = self._go_on(inputs, segment_ids_BT, convs, before)
        for name, stack, new in zip(names, stacks, moved, strict=True):
            self.put_variable(STATES, name, stack.at[chunk.at].set(new))
        return o_BTHV

    def _carry(
        self,
        segment: Segment,
        inputs: Sequence[jax.Array],
        segment_ids_BT: jax.Array,
        convs: Sequence[jax.Array],
    ) -> jax.Array:
        """o_BTHV of a piece of rows, from the states that the piece before it left."""
        names = _memory(convs)
        before: list[jax.Array] = [self.get_variable(ENTRY, name) for name in names]
        goes_on_B = segment.continues_B(segment_ids_BT)
        before = [
            jnp.where(goes_on_B.reshape(-1, *(1,) * (x.ndim - 1)), x, 0) for x in before
        ]
        o_BTHV, *moved = self._go_on(inputs, segment_ids_BT, convs, before)
        for name, new in zip(names, moved, strict=True):
            self.put_variable(LEAVING, name, new)
        if parameters.observing(self):
            state_BHKV = jax.lax.stop_gradient(moved[0])
            square_B = jnp.mean(jnp.square(state_BHKV), (1, 2, 3))
            self._observe(inputs, square_B, segment_ids_BT)
        return o_BTHV

    def _go_on(
        self,
        inputs: Sequence[jax.Array],
        segment_ids_BT: jax.Array | None,
        convs: Sequence[jax.Array],
        before: Sequence[jax.Array],
    ) -> Sequence[jax.Array]:
        """o_BTHV, and the states and tails that follow those of `before`."""
        axes = [AXES[name] for name in _memory(convs)]
        return islands.island(
            functools.partial(_extend, self.model.kda, len(convs)),
            *(*inputs, segment_ids_BT, *convs, *before),
            inputs=(
                *(*_input_axes(None), ("rows", None)),
                *(*(_CONV,) * len(convs), *axes),
            ),
            outputs=(("rows", None, "heads", None), *axes),
        )

    def _matrix(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return parameters.matrix(
            self, name, shape, self.model.init_std, self.model.dtype
        )

    def _convs(self) -> list[jax.Array]:
        """The kernels [H, K, W] of q, k and v, if there is a convolution."""
        cfg = self.model.kda
        if cfg.conv_width is None:
            return []
        sizes = {"q": cfg.key_dim, "k": cfg.key_dim, "v": cfg.value_dim}
        return [
            self.param(
                f"{name}_conv",
                parameters.conv_uniform,
                (cfg.num_heads, size, cfg.conv_width),
            )
            for name, size in sizes.items()
        ]

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


_CONV: sharding.Axes = ("heads", None, None)


def _memory(convs: Sequence[jax.Array]) -> list[str]:
    """The names of what a layer remembers."""
    return ["state", *("q_tail", "k_tail", "v_tail")[: len(convs)]]


def _input_axes(time: str | None) -> tuple[sharding.Axes, ...]:
    """Of q, k, v, g, beta, A_log and dt_bias."""
    channels: sharding.Axes = ("rows", time, "heads", None)
    per_head: sharding.Axes = ("rows", time, "heads")
    return (*(channels,) * 4, per_head, ("heads",), ("heads", None))


def _lower_bound(cfg: config.KDA) -> float | None:
    return cfg.gate_lower_bound if cfg.gate == "bounded" else None


def _mix(
    cfg: config.KDA,
    observing: bool,
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    g_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *convs: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """o_BTHV, and the mean square of each row's final state if `observing`, else 0.

    What a device does with its heads and its piece of time.
    """
    axis = islands.axis_if_split("context")
    if convs:
        conv: Callable[..., Any] = short_conv
        if axis is not None:
            conv = functools.partial(context_short_conv, axis=axis)
        q_BTHK, k_BTHK, v_BTHV = (
            conv(x, w_HKW.astype(x.dtype), segment_ids_BT)
            for x, w_HKW in zip((q_BTHK, k_BTHK, v_BTHV), convs, strict=True)
        )
    mix: Callable[..., Any] = kda
    if axis is not None:
        mix = functools.partial(context_kda, axis=axis, share_final_state=False)
    o_BTHV, state_BHKV = mix(
        *(nn.silu(x) for x in (q_BTHK, k_BTHK, v_BTHV)),
        g_BTHK,
        beta_BTH,
        segment_ids=segment_ids_BT,
        output_final_state=observing,
        chunk_size=cfg.chunk_size,
        residuals=cfg.residuals,
        **_settings(cfg, a_log_H, dt_bias_HK),
    )
    if state_BHKV is None:
        return o_BTHV, jnp.zeros(q_BTHK.shape[0], jnp.float32)
    square_B = jnp.mean(jnp.square(jax.lax.stop_gradient(state_BHKV)), (1, 2, 3))
    tensor = islands.axis_if_split("tensor")
    if tensor is not None:
        square_B = jax.lax.pmean(square_B, tensor)
    if axis is not None:
        square_B = from_rank(square_B, jax.lax.axis_size(axis) - 1, axis)
    return o_BTHV, square_B


def _extend(
    cfg: config.KDA,
    num_convs: int,
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    g_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    ids_BT: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """o_BTHV, and what remains of the state and the tails after the last real token.

    The first document of a row goes on from what is given; `ids_BT` is 0 at padding.
    All of the time is on this device.
    """
    convs, state_BHKV, tails = rest[:num_convs], rest[num_convs], rest[num_convs + 1 :]
    q, k, v = q_BTHK, k_BTHK, v_BTHV
    if convs:
        (q, q_tail), (k, k_tail), (v, v_tail) = (
            short_conv(x, w_HKW.astype(x.dtype), ids_BT, tail, output_tail=True)
            for x, w_HKW, tail in zip((q, k, v), convs, tails, strict=True)
        )
        tails = (q_tail, k_tail, v_tail)
    q, k, v = (nn.silu(x) for x in (q, k, v))
    settings = _settings(cfg, a_log_H, dt_bias_HK)
    if ids_BT.shape[1] > 1:
        o_BTHV, moved_BHKV = kda(
            *(q, k, v, g_BTHK, beta_BTH),
            initial_state=state_BHKV,
            segment_ids=ids_BT,
            output_final_state=True,
            chunk_size=cfg.chunk_size,
            residuals=cfg.residuals,
            **settings,
        )
        assert moved_BHKV is not None  # it was asked for
        return o_BTHV, moved_BHKV, *tails
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g_BTHK, beta_BTH))
    o_BHV, moved_BHKV = kda_step(q, k, v, g, beta, state_BHKV, **settings)
    real_B111 = ids_BT[:, :, None, None] > 0
    return o_BHV[:, None], jnp.where(real_B111, moved_BHKV, state_BHKV), *tails


def _settings(
    cfg: config.KDA, a_log_H: jax.Array, dt_bias_HK: jax.Array
) -> dict[str, Any]:
    """What `kda` and `kda_step` are told alike."""
    return {
        "A_log": a_log_H,
        "dt_bias": dt_bias_HK.reshape(-1),
        "lower_bound": _lower_bound(cfg),
        "use_gate_in_kernel": True,
        "use_qk_l2norm": True,
        "use_beta_sigmoid": True,
        "implementation": cfg.implementation,
    }
