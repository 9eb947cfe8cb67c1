"""Images in prompts: files to features, and the tokens that they stand for."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import config
from kimi_jax.data import images, media
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError
from kimi_jax.modules import vision


def look(
    model: config.Model, variables: Any, files: Sequence[str | os.PathLike[str]]
) -> tuple[jax.Array, np.ndarray]:
    """What the tower makes of image files: features_MD, and their grids_I3.

    Raises:
      UserError: a file is no image, or the model sees none.
    """
    if model.vision is None or "vision" not in variables["params"]:
        raise UserError("the model has no vision tower; leave the images out")
    patches, grids = [], []
    for file in files:
        frames_FHWC = images.read_frames(file)
        height, width = frames_FHWC.shape[1:3]
        size = images.fit(height, width, model.vision)
        values, grid = images.to_patches(frames_FHWC, size, model.vision)
        patches.append(values.reshape(len(values), -1))
        grids.append(grid)
    grids_I3 = np.stack(grids)
    shown = vision.Media(
        jnp.asarray(np.concatenate(patches)[None]), jnp.asarray(grids_I3[None])
    )
    features = jax.jit(functools.partial(vision.features, model))
    count = int(media.merged_patches(grids_I3, model.vision.merge).sum())
    return features(variables, shown)[0, :count], grids_I3


def encode(
    model: config.Model, text: str, grids_I3: np.ndarray, tokenizer: Tokenizer
) -> list[int]:
    """The ids of a text with a mark for each image, all placeholders included.

    Raises:
      UserError: there are more or fewer marks than images.
    """
    assert model.vision is not None  # it has seen the images
    placeholder, tokens = model.vision.placeholder, [tokenizer.bos]
    for number, part in enumerate(text.split(media.MARK)):
        tokens += [placeholder] * bool(number)
        tokens += tokenizer.encode(part.encode()).tolist()
    merge = model.vision.merge
    return media.expand(np.array(tokens), grids_I3, placeholder, merge).tolist()
