"""Sizes by the released rule, pixels as Pillow resizes them, errors that name files."""

import numpy as np
import pytest
from PIL import Image

from configs import common
from kimi_jax.config import Vision
from kimi_jax.data import images
from kimi_jax.errors import UserError

VISION = Vision(**common.vision())


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "want"),
    [
        (28, 56, (28, 56, 2, 4)),  # fits as it is
        (29, 1, (29, 1, 4, 2)),  # padded to whole squares
        (3584, 3584, (3584, 3584, 256, 256)),  # the largest
        (7168, 7168, (3584, 3584, 256, 256)),  # scaled down
        (10, 14336, (5, 7168, 2, 512)),  # one side too long
    ],
)
def test_sizes_follow_the_released_rule(height, width, want):
    assert images.fit(height, width, VISION) == want


@pytest.mark.parametrize("size", [(100, 30), (500, 500), (28, 2000), (1, 1)])
@pytest.mark.parametrize("room", [24, 30, 96])
def test_an_image_is_scaled_into_the_room_there_is(size, room):
    found = images.fit_into(*size, VISION, room)
    assert 4 <= found.patches <= room
    assert found.rows * 14 >= found.height and found.columns * 14 >= found.width


def test_no_room_and_no_size_are_refused():
    with pytest.raises(UserError, match=r"into 3 patches; raise config.train.row_p"):
        images.fit_into(28, 28, VISION, 3)
    with pytest.raises(UserError, match=r"2000 x 28 .* or crop it"):
        images.fit_into(28, 2000, VISION, 8)
    with pytest.raises(UserError, match="0 x 5 pixels shows nothing"):
        images.fit(5, 0, VISION)


@pytest.mark.parametrize("size", [(47, 31), (20, 33), (61, 17), (90, 90), (20, 31)])
def test_pixels_are_those_of_pillow(size):
    image = noise(47, 33)
    resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC)
    different = images.resize(image, *size) != np.asarray(resized)
    # Versions of Pillow differ in which side they resize, and round, first.
    one_side = 47 in size or 33 in size
    assert different.mean() <= (0.0 if one_side else 0.5)


def test_patches_are_cut_row_by_row_and_normalised():
    frames = np.stack([noise(30, 56), noise(30, 56)[::-1]])
    pixels, grid = images.to_patches(frames, images.fit(30, 56, VISION), VISION)
    assert grid.tolist() == [2, 4, 4] and pixels.shape == (32, 3, 14, 14)
    assert pixels.dtype == np.float32 and grid.dtype == np.int32
    patch = pixels[16 + 4 + 2]  # second frame, second row, third column
    want = frames[1, 14:28, 28:42].transpose(2, 0, 1) / 255.0
    np.testing.assert_allclose(patch, (want - 0.5) / 0.5, atol=1e-6)
    assert (pixels[8:12, :, 2:] == -1).all()  # padding is black


def test_files_are_read(tmp_path):
    image = noise(20, 30)
    Image.fromarray(image).save(tmp_path / "a.png")
    np.testing.assert_array_equal(images.read_frames(tmp_path / "a.png"), image[None])
    assert images.read_header(tmp_path / "a.png") == (20, 30, 1)
    clip = [Image.fromarray(x) for x in (image, 255 - image, image)]
    clip[0].save(tmp_path / "b.webp", save_all=True, append_images=clip[1:])
    assert images.read_header(tmp_path / "b.webp") == (20, 30, 3)
    assert images.read_frames(tmp_path / "b.webp").shape == (3, 20, 30, 3)


def test_transparent_is_white_and_grey_has_three_channels(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "a.png")
    Image.new("L", (2, 2), 7).save(tmp_path / "b.png")
    assert (images.read_frames(tmp_path / "a.png") == 255).all()
    assert (images.read_frames(tmp_path / "b.png") == 7).all()


def test_files_that_are_no_images_are_named(tmp_path, monkeypatch):
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    with pytest.raises(UserError, match=r"bad.png is no image .* PNG or JPEG"):
        images.read_frames(bad)
    with pytest.raises(UserError, match=r"gone.png: No such file"):
        images.read_header(tmp_path / "gone.png")
    Image.fromarray(noise(60, 60)).save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut.png is damaged"):
        images.read_frames(tmp_path / "cut.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.fromarray(noise(11, 11)).save(tmp_path / "big.png")
    with pytest.raises(UserError, match=r"big.png is too large .* 10 x 10 pixels"):
        images.read_header(tmp_path / "big.png")
