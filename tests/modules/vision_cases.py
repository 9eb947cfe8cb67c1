"""A tiny vision tower, and images for it."""

import jax.numpy as jnp
import numpy as np

from configs import common
from kimi_jax import config_io
from kimi_jax.config import Config
from kimi_jax.modules import vision
from tests import tiny

GRIDS = ((1, 2, 4), (3, 4, 2))  # 32 patches, 4 merged
P = 40


def make(*overrides: str) -> Config:
    """A model of one layer that compiles fast, with a tiny tower."""
    values = tiny.values()
    values.model.update(num_layers=1, attention=("gqa",))
    values.model.ffn.num_dense_layers = 1
    values.model.vision = common.vision()
    values.model.vision.update(
        patch_size=2,
        width=16,
        num_heads=2,
        head_dim=8,
        mlp_width=24,
        position_rows=3,
        position_columns=5,
        block_size=16,
    )
    values.train.update(row_patches=P, row_items=3)
    return config_io.from_dict(values, overrides)


def draw(seed: int, grids=GRIDS) -> np.ndarray:
    """Pixel values of items."""
    patches = sum(t * h * w for t, h, w in grids)
    return np.random.default_rng(seed).normal(size=(patches, 12)).astype(np.float32)


def media(rows) -> vision.Media:
    """Rows of (pixels, grids)."""
    patches = np.zeros((len(rows), P, 12), np.float32)
    table = np.zeros((len(rows), 3, 3), np.int32)
    for row, (pixels, grids) in enumerate(rows):
        patches[row, : len(pixels)], table[row, : len(grids)] = pixels, grids
    return vision.Media(jnp.asarray(patches), jnp.asarray(table))
