"""One sublayer: read the residual scheme, normalise, apply one layer, add the result.

Every attention and every feed-forward layer of the model is wrapped the same way. With
Block Attention Residuals (Kimi K3 report Eq. 8-10) the input is a softmax mixture of
the embedding, the sums of earlier blocks, and the running sum of this block; no other
residual connection exists. The baselines read the running sum alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.modules.cache import Chunk, Segment
from kimi_jax.modules.gqa import GroupedQueryAttention
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.modules.mla import MultiHeadLatentAttention
from kimi_jax.modules.mlp import MLP
from kimi_jax.modules.moe import LatentMoE
from kimi_jax.ops import residuals
from kimi_jax.ops.norms import rms_norm

ATTENTION = {
    "kda": KimiDeltaAttention,
    "mla": MultiHeadLatentAttention,
    "gqa": GroupedQueryAttention,
}


class Bank(NamedTuple):
    """Finished sources of the depth attention; constant inside a residual block."""

    sources_SBTD: jax.Array  # the embedding, then block sums; the rest is unused
    inverse_rms_SBT: jax.Array
    num_sources: jax.Array  # int32 scalar


class Stream(NamedTuple):
    """What flows down the depth. Unused parts are None."""

    partial_BTD: jax.Array  # running sum: of this block, or of everything
    has_partial: jax.Array  # bool scalar; False right after a block boundary
    bank: Bank | None  # block_attention
    block_input_BTD: jax.Array | None  # additive: partial_BTD when the block began


class ReadResidual(nn.Module):
    """The input of a sublayer, [B, T, D]; owns the depth attention's query and gain."""

    model: config.Model

    @nn.compact
    def __call__(self, stream: Stream, segment_ids_BT: jax.Array | None) -> jax.Array:
        if stream.bank is None:
            return stream.partial_BTD
        # Training starts from zero queries, which make the mixture a plain mean.
        query_D = self.param("query", nn.initializers.zeros, (self.model.width,))
        h_BTD, weights_SBT = residuals.mix_sources(
            stream.bank.sources_SBTD,
            stream.bank.num_sources,
            stream.partial_BTD,
            stream.has_partial,
            query_D,
            parameters.gain(self, "gain", self.model.width),
            self.model.norm_eps,
            inverse_rms_SBT=stream.bank.inverse_rms_SBT,
        )
        if parameters.observing(self):
            total_S = residuals.total_depth_weights(weights_SBT, segment_ids_BT)
            parameters.sow_stat(self, "depth_weights", total_S)
        return h_BTD


class Sublayer(nn.Module):
    """Stream -> Stream with one layer of `kind` applied.

    With `chunk`, the tokens go on where the cache, or the past of the segment, in the
    layer's variables, ends; what follows is left there.
    """

    model: config.Model
    kind: str

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        segment_ids_BT: jax.Array | None,
        chunk: Chunk | Segment | None = None,
    ) -> Stream:
        model = self.model
        h_BTD = ReadResidual(model, name="residual")(stream, segment_ids_BT)
        gain_D = parameters.gain(self, "norm", model.width)
        x_BTD = rms_norm(h_BTD, gain_D, model.norm_eps)
        if self.kind in ATTENTION:
            layer = ATTENTION[self.kind](model, name=self.kind)
            y_BTD = layer(x_BTD, segment_ids_BT, chunk)
        elif self.kind == "moe":
            infer = isinstance(chunk, Chunk)
            y_BTD = LatentMoE(model, name="moe")(x_BTD, segment_ids_BT, infer)
        else:
            y_BTD = MLP(model, model.ffn.width, name="mlp")(x_BTD, segment_ids_BT)
        partial_BTD = stream.partial_BTD + y_BTD
        if parameters.observing(self):
            square = residuals.total_mean_square(partial_BTD, segment_ids_BT)
            parameters.sow_stat(self, "stream_square", square)
        return stream._replace(partial_BTD=partial_BTD, has_partial=jnp.array(True))


class BlockStart(nn.Module):
    """Crosses the boundary of a residual block.

    block_attention: the running sum becomes a source of its own and starts again.
    additive: the sum of the previous block is added once more with a learned weight,
    which starts at zero.
    """

    model: config.Model

    @nn.compact
    def __call__(self, stream: Stream) -> Stream:
        if stream.bank is not None:
            return _push(stream, stream.bank, self.model.norm_eps)
        if stream.block_input_BTD is not None:
            weight = self.param("weight", nn.initializers.zeros, ())
            block_sum_BTD = stream.partial_BTD - stream.block_input_BTD
            partial_BTD = (
                stream.partial_BTD + weight.astype(block_sum_BTD.dtype) * block_sum_BTD
            )
            return stream._replace(partial_BTD=partial_BTD, block_input_BTD=partial_BTD)
        return stream


def _push(stream: Stream, bank: Bank, eps: float) -> Stream:
    partial_BTD, at = stream.partial_BTD, bank.num_sources
    inverse_rms_BT = residuals.inverse_rms(partial_BTD, eps)
    return stream._replace(
        partial_BTD=jnp.zeros_like(partial_BTD),
        has_partial=jnp.array(False),
        bank=Bank(
            sources_SBTD=bank.sources_SBTD.at[at].set(partial_BTD),
            inverse_rms_SBT=bank.inverse_rms_SBT.at[at].set(inverse_rms_BT),
            num_sources=at + 1,
        ),
    )


def start_stream(model: config.Model, num_blocks: int, x_BTD: jax.Array) -> Stream:
    """The stream before the first layer: the embedding is the running sum."""
    bank = None
    if model.residual.kind == "block_attention":
        statistics = jnp.promote_types(x_BTD.dtype, jnp.float32)
        bank = Bank(
            sources_SBTD=jnp.zeros((num_blocks, *x_BTD.shape), x_BTD.dtype),
            inverse_rms_SBT=jnp.zeros((num_blocks, *x_BTD.shape[:-1]), statistics),
            num_sources=jnp.zeros((), jnp.int32),
        )
    additive = model.residual.kind == "additive"
    return Stream(x_BTD, jnp.array(True), bank, x_BTD if additive else None)
