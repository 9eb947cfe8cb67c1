"""A published vision_config as the `vision` section of a model, and back.

Source: config.json of the released checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_jax.config import Vision

PLACEHOLDER = "media_placeholder_token_id"  # in the outer config

# Published field -> ours.
_DIRECT = {
    "patch_size": "patch_size",
    "vt_hidden_size": "width",
    "vt_num_hidden_layers": "num_layers",
    "vt_num_attention_heads": "num_heads",
    "vt_intermediate_size": "mlp_width",
    "init_pos_emb_height": "position_rows",
    "init_pos_emb_width": "position_columns",
    "init_pos_emb_time": "max_frames",
    "projector_ln_eps": "projector_norm_eps",
}
# Published field -> the only value that this library computes.
_FIXED = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
}
# Read by `values`.
_SIZES = (
    "qkv_hidden_size",
    "merge_kernel_size",
    "mm_hidden_size",
    "text_hidden_size",
)
_UNUSED = {"model_type", "dtype", "torch_dtype"}
ROPE_BASE = 10000.0  # the released code's, in no config


def problems(outer: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be read in the vision_config of `outer`, a line each."""
    vision, where = outer["vision_config"], "vision_config"
    for name in sorted(set(vision) - {*_DIRECT, *_FIXED, *_SIZES, *_UNUSED}):
        yield f"{where}.{name}: unknown field"
    for name, value in _FIXED.items():
        if name in vision and vision[name] != value:
            yield (
                f"{where}.{name}={json.dumps(vision[name])}: only {json.dumps(value)} "
                "is supported"
            )
    missing = [name for name in (*_DIRECT, *_SIZES) if name not in vision]
    yield from (f"{where}.{name}: missing" for name in missing)
    if PLACEHOLDER not in outer:
        yield f"{PLACEHOLDER}: missing, but there is a vision_config"
    if missing:
        return
    kernel, heads = vision["merge_kernel_size"], vision["vt_num_attention_heads"]
    if len(kernel) != 2 or kernel[0] != kernel[1]:
        yield f"{where}.merge_kernel_size={kernel}: only squares are supported"
    if vision["qkv_hidden_size"] % heads:
        yield (
            f"{where}.qkv_hidden_size={vision['qkv_hidden_size']}: must be a multiple "
            f"of vt_num_attention_heads={heads}"
        )
    for name, other, size in (
        ("mm_hidden_size", "vt_hidden_size", vision["vt_hidden_size"]),
        ("text_hidden_size", "text_config.hidden_size", text.get("hidden_size")),
    ):
        if vision[name] != size:
            yield f"{where}.{name}={vision[name]}: must equal {other}={size}"


def values(outer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Plain values of `config.Vision`; None without a vision_config."""
    vision = outer.get("vision_config")
    if not vision:
        return None
    return {ours: vision[name] for name, ours in _DIRECT.items()} | {
        "head_dim": vision["qkv_hidden_size"] // vision["vt_num_attention_heads"],
        "rope_base": ROPE_BASE,
        "merge": vision["merge_kernel_size"][0],
        "placeholder": outer[PLACEHOLDER],
        "block_size": 512,
    }


def publish(vision: Vision, text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model with a tower, around that of its text model."""
    fields = {name: getattr(vision, ours) for name, ours in _DIRECT.items()}
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        PLACEHOLDER: vision.placeholder,
        "text_config": dict(text),
        "vision_config": {
            **fields,
            **_FIXED,
            "qkv_hidden_size": vision.num_heads * vision.head_dim,
            "merge_kernel_size": [vision.merge, vision.merge],
            "mm_hidden_size": vision.width,
            "text_hidden_size": text["hidden_size"],
        },
    }
