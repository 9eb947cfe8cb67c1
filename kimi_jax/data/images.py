"""From image files to patches: decode, resize to the patch grid, normalise, cut.

An item is frames [F, H, W, 3] of bytes: an image is one frame, a clip several. The rule
for sizes is the released one: scale down, never up, until the patches are few enough;
then pad with black on the right and below to whole squares of patches. Pillow decodes
files; all else is numpy.

Source: K3's model card (mean = std = 0.5, 3584 x 3584 pixels at most); the size rule of
the released image processor.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from kimi_jax.config import Vision
from kimi_jax.errors import UserError

MAX_PATCHES = 256 * 256  # of an image: 3584 x 3584 pixels in patches of 14
MAX_SIDE = 512  # patches along one side


class Fit(NamedTuple):
    """What an image of some size becomes: pixels of it, then patches with padding."""

    height: int
    width: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class Header(NamedTuple):
    """What a file says without being decoded."""

    height: int
    width: int
    frames: int


def read_header(file: str | os.PathLike[str]) -> Header:
    """Size and number of frames of an image file.

    Raises:
      UserError: it cannot be read or is no image; names the file.
    """
    with _open(file) as image:
        return Header(image.height, image.width, getattr(image, "n_frames", 1))


def read_frames(file: str | os.PathLike[str]) -> np.ndarray:
    """All frames of an image file, RGB bytes [F, H, W, 3]; transparent is white.

    Raises:
      UserError: it cannot be read, is no image, is cut off, or would take more than
        Pillow's limit of pixels; names the file.
    """
    with _open(file) as image:
        try:
            frames = [_rgb(frame) for frame in ImageSequence.Iterator(image)]
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(
                f"{os.fspath(file)} is damaged: {error}; replace the file or leave its "
                "line out"
            ) from error
    return np.stack(frames)


def _open(file: str | os.PathLike[str]) -> Image.Image:
    name = os.fspath(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(name)
    except UnidentifiedImageError:
        raise UserError(
            f"{name} is no image that can be read; convert it to PNG or JPEG"
        ) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        limit = math.isqrt(Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(
            f"{name} is too large to decode: more than about {limit:,} x {limit:,} "
            "pixels; scale it down first"
        ) from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}") from error


def _rgb(image: Image.Image) -> np.ndarray:
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        image = Image.alpha_composite(white, rgba)
    return np.asarray(image.convert("RGB"))


def fit(height: int, width: int, vision: Vision, max_patches: int = MAX_PATCHES) -> Fit:
    """The released size rule for an image of height x width pixels.

    Padding to whole squares may give somewhat more than `max_patches`.

    Raises:
      UserError: a side is zero.
    """
    if height < 1 or width < 1:
        raise UserError(
            f"an image of {width} x {height} pixels shows nothing; leave it out"
        )
    p, square = vision.patch_size, vision.patch_size * vision.merge
    whole = max(1, width // p) * max(1, height // p)
    side = MAX_SIDE * p
    scale = min(1.0, math.sqrt(max_patches / whole), side / width, side / height)
    height, width = (min(max(1, int(n * scale)), side) for n in (height, width))
    rows, columns = (-(-n // square) * vision.merge for n in (height, width))
    return Fit(height, width, rows, columns)


def fit_into(height: int, width: int, vision: Vision, room: int) -> Fit:
    """`fit` to at most `room` patches, padding included.

    Raises:
      UserError: a side is zero, or the image does not fit however small it is made.
    """
    limit = min(room, MAX_PATCHES)
    while limit >= 1:
        found = fit(height, width, vision, limit)
        if found.patches <= room:
            return found
        limit = min(limit - 1, limit * room // found.patches)
    raise UserError(
        f"an image of {width} x {height} pixels does not fit into {room} patches; "
        "raise config.train.row_patches or crop it"
    )


def to_patches(
    frames_FHWC: np.ndarray, size: Fit, vision: Vision
) -> tuple[np.ndarray, np.ndarray]:
    """What the tower takes of one item.

    Args:
      frames_FHWC: RGB bytes, [F, H, W, 3].

    Returns:
      pixel_values, float32 [N, 3, p, p] in [-1, 1], patches in the order frame, row,
      column; grid, int32 [3]: (t, h, w) with N = t h w.
    """
    p = vision.patch_size
    F = len(frames_FHWC)
    canvas = np.zeros((F, size.rows * p, size.columns * p, 3), np.uint8)
    for canvas_HWC, frame_HWC in zip(canvas, frames_FHWC, strict=True):
        canvas_HWC[: size.height, : size.width] = resize(
            frame_HWC, size.height, size.width
        )
    values = canvas.astype(np.float32) / 127.5 - 1.0
    cut = values.reshape(F, size.rows, p, size.columns, p, 3)
    pixel_values = cut.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3, p, p)
    return pixel_values, np.array([F, size.rows, size.columns], np.int32)


def resize(image_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bytes [H, W, C] to bytes [height, width, C], bicubic.

    The kernel (Keys, a = -1/2) is widened by the factor of a reduction, so that every
    pixel counts; height first, rounded to bytes after each side, as Pillow does.
    """
    for axis, size in ((0, height), (1, width)):
        if image_HWC.shape[axis] != size:
            weights = _weights(image_HWC.shape[axis], size)
            mixed = np.tensordot(weights, image_HWC.astype(np.float32), (1, axis))
            mixed = np.moveaxis(mixed, 0, axis)
            image_HWC = np.clip(np.floor(mixed + 0.5), 0, 255).astype(np.uint8)
    return image_HWC


def _weights(old: int, new: int) -> np.ndarray:
    """float32 [new, old]: how much of each old pixel is in each new one."""
    scale = max(1.0, old / new)
    centre_N1 = (np.arange(new)[:, None] + 0.5) * (old / new)
    x = np.abs((np.arange(old) + 0.5 - centre_N1) / scale)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
