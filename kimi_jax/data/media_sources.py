"""What a user names to examples of text with images.

images:FILE.jsonl   a line {"text": "... <image> ...", "images": [ITEM, ...]} each;
                    ITEM is a file, a clip if it is animated, or a list of files,
                    the frames of a clip; paths are relative to FILE's folder
words:N             N pictures of numbers, drawn on the spot (`words`)
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from kimi_jax.config import Config
from kimi_jax.data import images, media, words
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError

PAIRS, WORDS = "images:", "words:"


def is_media(source: str) -> bool:
    """Whether `source` names text with images."""
    return source.startswith((PAIRS, WORDS))


def load_store(source: str, tokenizer: Tokenizer, cfg: Config) -> media.MediaStore:
    """The store of the media source `source`; reads headers of files, no pixels.

    Raises:
      UserError: the config has no place for images, or see `media.make_store`.
    """
    vision = cfg.model.vision
    where = f"config.data.sources: {source!r} has images, but"
    if vision is None:
        raise UserError(
            f"{where} config.model.vision is none; use a config with that section, "
            "such as configs/vision_words.py"
        )
    room = room_of(cfg)
    if not room.patches:
        raise UserError(
            f"{where} config.train.row_patches=0; set it to the patches that a row may "
            "hold, such as 256, and config.train.row_items to the images"
        )
    text_only = tokenizer.bytes_per_token[vision.placeholder : vision.placeholder + 1]
    if text_only.any() or vision.placeholder in (tokenizer.bos, tokenizer.eod):
        raise UserError(
            f"config.model.vision.placeholder={vision.placeholder}: the tokenizer "
            f"{tokenizer.name!r} uses this token in texts; choose a free special token"
        )
    if source.startswith(WORDS):
        examples = words.examples(source.removeprefix(WORDS), cfg.data.seed)
    else:
        examples = _pairs(pathlib.Path(source.removeprefix(PAIRS)))
    return media.make_store(examples, tokenizer, vision, room, source)


def room_of(cfg: Config) -> media.Room:
    """What a row of the run's batches holds beside tokens."""
    train, vision = cfg.train, cfg.model.vision
    if vision is None or not train.row_patches:
        return media.NO_ROOM
    return media.Room(train.row_patches, train.row_items, 3 * vision.patch_size**2)


def _pairs(file: pathlib.Path) -> Iterator[media.Example]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{PAIRS}{file}: {reason}; name a .jsonl file") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"{file}, line {number}"
        try:
            row = json.loads(line)
            text, named = row["text"], row["images"]
            if not isinstance(text, str) or not isinstance(named, list):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{name}: must be {{"text": "... {media.MARK} ...", "images": '
                '["a.png", ["frame_0.png", "frame_1.png"]]}'
            ) from None
        try:
            items = tuple(_item(file.parent, each) for each in named)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        yield media.Example(name, text, items)


def _item(folder: pathlib.Path, named: str | list[str]) -> media.Item:
    files = [folder / n for n in ([named] if isinstance(named, str) else named)]
    if not files:
        raise UserError("a clip without frames; name its files or leave it out")
    headers = [images.read_header(file) for file in files]
    if len({header[:2] for header in headers}) > 1:
        raise UserError(
            f"the frames of a clip differ in size: {files[0].name}, ...; bring them to "
            "one size"
        )
    stamps = [os.stat(file) for file in files]
    name = ", ".join(
        f"{file} ({stamp.st_size} bytes, {stamp.st_mtime_ns})"
        for file, stamp in zip(files, stamps, strict=True)
    )
    height, width, _ = headers[0]
    frames = sum(header.frames for header in headers)
    return media.Item(name, height, width, frames, functools.partial(_read, files))


def _read(files: list[pathlib.Path]) -> np.ndarray:
    return np.concatenate([images.read_frames(file) for file in files])
