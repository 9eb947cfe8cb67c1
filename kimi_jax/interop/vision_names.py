"""The entries of a vision tower and its projector.

Both are carried as they are published, under `params/vision/` and their own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_jax.interop.entries import Entry, plain


def vision_entries(vision: Mapping[str, Any]) -> list[Entry]:
    """Every array of the tower and the projector.

    Args:
      vision: the vision_config of a published config.json.
    """
    D, F = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    P, Q = vision["patch_size"], vision["qkv_hidden_size"]
    rows, columns = vision["merge_kernel_size"]
    merged, out = rows * columns * vision["mm_hidden_size"], vision["text_hidden_size"]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], D)
    shapes = {
        "vision_tower.patch_embed.proj": (D, 3, P, P),
        "vision_tower.patch_embed.pos_emb": grid,
    }
    for i in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{i}."
        shapes |= {
            f"{block}norm0": (D,),
            f"{block}wqkv": (3 * Q, D),
            f"{block}wo": (D, Q),
            f"{block}norm1": (D,),
            f"{block}mlp.fc0": (F, D),
            f"{block}mlp.fc1": (D, F),
        }
    shapes |= {
        "vision_tower.encoder.final_layernorm": (D,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (out, merged),
        "mm_projector.post_norm": (out,),
    }
    return [
        plain(f"params/vision/{name.replace('.', '/')}", f"{name}.weight", shape)
        for name, shape in shapes.items()
    ]
