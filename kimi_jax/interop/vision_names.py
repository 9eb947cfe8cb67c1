"""The entries of a vision tower and its projector.

Both are carried as they are published, under `params/vision/` and their own name.
"""

from __future__ import annotations

from collections.abc import Mapping

from kimi_jax.interop.entries import Entry, Shape, plain

PREFIXES = ("vision_tower.", "mm_projector.")


def vision_entries(tensors: Mapping[str, Shape]) -> list[Entry]:
    """One entry for each vision tensor among `tensors`, {published name: shape}."""
    return [
        plain(f"params/vision/{name.replace('.', '/')}", name, shape)
        for name, shape in tensors.items()
        if name.startswith(PREFIXES)
    ]
