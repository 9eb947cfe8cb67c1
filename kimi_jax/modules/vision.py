"""The vision tower and its projector: patches -> features that stand in for tokens.

MoonViT-V2 (Kimi K3 report Sec. 2.4): a linear map of each patch, a learned grid of
positions and a time code, layers of bidirectional attention inside each item, a mean
over frames, then 2 x 2 patches projected to one feature of the text model's width. The
layers are one `lax.scan`. What is known of patches only by their grid is in
`kimi_jax.ops.vision`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import config, sharding
from kimi_jax.modules import islands, parameters
from kimi_jax.ops import vision as ops
from kimi_jax.ops.item_attention import item_attention
from kimi_jax.ops.norms import rms_norm

# The released norms name no epsilon; torch then takes that of the dtype. Float32's is
# taken whatever the model computes in: bfloat16's, 0.008, would change the function.
NORM_EPS = float(jnp.finfo(jnp.float32).eps)

Variables = dict[str, Any]


class Media(NamedTuple):
    """Images and clips of a batch, each row's one after the other, then padding."""

    patches_BPC: jax.Array  # float32 [B, P, 3 patch_size^2]: channels, rows, columns
    grids_BI3: jax.Array  # int32 [B, I, 3]: (t, h, w) in patches; zeros: no item


class PatchEmbedding(nn.Module):
    """patches_BPC -> x_BPD: a linear map, plus where and when a patch is."""

    model: config.Model

    @nn.compact
    def __call__(self, patches_BPC: jax.Array, places: ops.Places) -> jax.Array:
        cfg, dtype = _section(self.model), self.model.dtype
        C, D = patch_values(cfg), cfg.width
        patch_CD = _uniform(self, "patch", (C, D), C, dtype)
        table = (cfg.position_rows, cfg.position_columns, D)
        position_YXD = self.param("position", _normal, table)
        x_BPD = patches_BPC.astype(dtype) @ patch_CD
        # In float32: bfloat16 positions of neighbours would often be equal.
        where_BPD = ops.grid_positions(position_YXD, places)
        where_BPD += ops.time_code(places, cfg.max_frames, D)
        return (x_BPD + where_BPD).astype(dtype)


class EncoderLayer(nn.Module):
    """x_BPD -> x_BPD: attention inside each item, then an MLP, both pre-normed."""

    model: config.Model

    @nn.compact
    def __call__(self, x_BPD: jax.Array, places: ops.Places) -> jax.Array:
        cfg, dtype = _section(self.model), self.model.dtype
        D, H, K, F = cfg.width, cfg.num_heads, cfg.head_dim, cfg.mlp_width
        h_BPD = rms_norm(x_BPD, parameters.gain(self, "attention_norm", D), NORM_EPS)
        qkv_DSHK = _uniform(self, "qkv", (D, 3, H, K), D, dtype)
        q_BPHK, k_BPHK, v_BPHK = jnp.einsum("bpd,dshk->sbphk", h_BPD, qkv_DSHK)
        q_BPHK, k_BPHK = (
            ops.rotate_in_plane(z, places, cfg.rope_base) for z in (q_BPHK, k_BPHK)
        )
        heads = ("rows", None, "heads", None)
        o_BPHK = islands.island(
            functools.partial(item_attention, scale=K**-0.5, block_size=cfg.block_size),
            *(q_BPHK, k_BPHK, v_BPHK, places.item_BP),
            inputs=(heads, heads, heads, ("rows", None)),
            outputs=heads,
        )
        o_HKD = _uniform(self, "o", (H, K, D), H * K, dtype)
        x_BPD += jnp.einsum("bphk,hkd->bpd", o_BPHK.astype(dtype), o_HKD)
        h_BPD = rms_norm(x_BPD, parameters.gain(self, "mlp_norm", D), NORM_EPS)
        hidden_BPF = jax.nn.gelu(h_BPD @ _he(self, "up", (D, F), dtype))
        return x_BPD + hidden_BPF @ _he(self, "down", (F, D), dtype)


class Merge(nn.Module):
    """x_BPD -> [B, M, merge^2 D]: the last norm, frames pooled, squares joined."""

    model: config.Model

    @nn.compact
    def __call__(self, x_BPD: jax.Array, places: ops.Places) -> jax.Array:
        cfg = _section(self.model)
        x_BPD = rms_norm(x_BPD, parameters.gain(self, "norm", cfg.width), NORM_EPS)
        return ops.pool_and_merge(x_BPD, places, cfg.merge)


class Projector(nn.Module):
    """[B, M, merge^2 D] -> features_BME of the text model's width E."""

    model: config.Model

    @nn.compact
    def __call__(self, x_BMS: jax.Array) -> jax.Array:
        cfg, model = _section(self.model), self.model
        S, E = cfg.merge**2 * cfg.width, model.width
        hidden_BMS = x_BMS @ _he(self, "project_in", (S, S), model.dtype)
        hidden_BMS = jax.nn.gelu(hidden_BMS, approximate=False)
        out_BME = hidden_BMS @ _he(self, "project_out", (S, E), model.dtype)
        return rms_norm(
            out_BME, parameters.gain(self, "norm", E), cfg.projector_norm_eps
        )


def init(model: config.Model, key: jax.Array) -> Variables:
    """Fresh parameters: the children embedding, layers (stacked), merge, projector."""
    cfg = _section(model)
    P = cfg.merge**2
    places = ops.locate(jnp.array([[[1, cfg.merge, cfg.merge]]]), P, cfg.merge)
    x_BPD = jnp.zeros((1, P, cfg.width), model.dtype)
    keys = jax.random.split(key, cfg.num_layers + 3)

    def draw(key: jax.Array) -> Any:
        return EncoderLayer(model).init(key, x_BPD, places)["params"]

    patches_BPC = jnp.zeros((1, P, patch_values(cfg)), jnp.float32)
    merged_BMS = x_BPD.reshape(1, 1, P * cfg.width)
    return {
        "embedding": PatchEmbedding(model).init(keys[0], patches_BPC, places)["params"],
        "merge": Merge(model).init(keys[1], x_BPD, places)["params"],
        "projector": Projector(model).init(keys[2], merged_BMS)["params"],
        "layers": jax.vmap(draw)(keys[3:]),
    }


def features(
    model: config.Model,
    variables: Variables,
    media: Media,
    *,
    remat: str = "none",
) -> jax.Array:
    """features_BMD of what a batch shows, M = P / merge^2.

    In each row the features of its items follow one another in the order that the
    placeholders of a text take them; after the last they mean nothing.

    Args:
      variables: of the whole model, from `transformer.init`.
      remat: anything but "none" computes each layer again in the backward pass.
    """
    params = variables["params"]["vision"]
    merged_BMS = encode(model, params, media, remat=remat)
    return _call(Projector(model), params["projector"], merged_BMS)


def encode(
    model: config.Model, params: Any, media: Media, *, remat: str = "none"
) -> jax.Array:
    """The tower without the projector: [B, M, merge^2 D]. `params` are the tower's."""
    cfg = _section(model)
    places = ops.locate(media.grids_BI3, media.patches_BPC.shape[1], cfg.merge)

    def layer(x_BPD: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return _call(EncoderLayer(model), own, x_BPD, places), None

    if remat != "none":
        layer = jax.checkpoint(layer, prevent_cse=False)
    embedding = PatchEmbedding(model)
    x_BPD = _call(embedding, params["embedding"], media.patches_BPC, places)
    x_BPD = sharding.constrain(x_BPD, "rows", None, None)
    x_BPD, _ = jax.lax.scan(layer, x_BPD, params["layers"])
    return _call(Merge(model), params["merge"], x_BPD, places)


def _call(module: nn.Module, params: Any, *inputs: Any) -> Any:
    return module.apply({"params": params}, *inputs)


def placeholders(model: config.Model, tokens_BT: jax.Array) -> jax.Array:
    """Where a text shows an image: bool [B, T]."""
    return tokens_BT == _section(model).placeholder


def patch_values(cfg: config.Vision) -> int:
    """Numbers that a patch is made of."""
    return 3 * cfg.patch_size**2


def _section(model: config.Model) -> config.Vision:
    if model.vision is None:
        raise ValueError(
            "config.model.vision is none, so the model sees no images; use a config "
            "with that section, or pass no media"
        )
    return model.vision


def _uniform(
    module: nn.Module, name: str, shape: tuple[int, ...], fan_in: int, dtype: str
) -> jax.Array:
    """A matrix drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), torch's own draw."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return module.param(name, init, shape).astype(dtype)


def _he(module: nn.Module, name: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """A matrix [in, out] of truncated normals of variance 2 / in."""
    init = jax.nn.initializers.he_normal(in_axis=0, out_axis=1)
    return module.param(name, init, shape, jnp.float32).astype(dtype)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # Drawn flat: XLA:CPU compiles normal draws of several axes slowly.
    flat = jax.random.normal(key, (math.prod(shape),), jnp.float32)
    return flat.reshape(shape)
