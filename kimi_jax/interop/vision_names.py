"""The entries of a vision tower and its projector."""

from __future__ import annotations

import dataclasses

from kimi_jax import config
from kimi_jax.interop.entries import Entry, linear, plain

_OURS = "params/vision"


def vision_entries(vision: config.Vision, width: int) -> list[Entry]:
    """Every array of the tower and the projector, in the order of the forward pass.

    Args:
      width: of the text model.
    """
    D, p = vision.width, vision.patch_size
    grid = (vision.position_rows, vision.position_columns, D)
    embed, ours = "vision_tower.patch_embed", f"{_OURS}/embedding"
    # A convolution of patches, which is a Linear of their values.
    patch = linear(f"{ours}/patch", f"{embed}.proj.weight", (D,), (3 * p * p,))
    entries = [
        dataclasses.replace(patch, stored=(D, 3, p, p)),
        plain(f"{ours}/position", f"{embed}.pos_emb.weight", grid),
    ]
    for i in range(vision.num_layers):
        entries += _layer(vision, i)
    final = "vision_tower.encoder.final_layernorm.weight"
    size, ours = vision.merge**2 * D, f"{_OURS}/projector"
    return [
        *entries,
        plain(f"{_OURS}/merge/norm", final, (D,)),
        linear(f"{ours}/project_in", "mm_projector.proj.0.weight", (size,), (size,)),
        linear(f"{ours}/project_out", "mm_projector.proj.2.weight", (width,), (size,)),
        plain(f"{ours}/norm", "mm_projector.post_norm.weight", (width,)),
    ]


def _layer(vision: config.Vision, i: int) -> list[Entry]:
    name, theirs = f"{_OURS}/layer_{i:03d}", f"vision_tower.encoder.blocks.{i}"
    D, F = (vision.width,), (vision.mlp_width,)
    heads = (vision.num_heads, vision.head_dim)
    return [
        plain(f"{name}/attention_norm", f"{theirs}.norm0.weight", D),
        linear(f"{name}/qkv", f"{theirs}.wqkv.weight", (3, *heads), D),
        linear(f"{name}/o", f"{theirs}.wo.weight", D, heads),
        plain(f"{name}/mlp_norm", f"{theirs}.norm1.weight", D),
        linear(f"{name}/up", f"{theirs}.mlp.fc0.weight", F, D),
        linear(f"{name}/down", f"{theirs}.mlp.fc1.weight", D, F),
    ]
