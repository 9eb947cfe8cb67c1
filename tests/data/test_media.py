"""Documents with images: expanded, packed whole, learned from in their text alone."""

import json

import numpy as np
import pytest
from PIL import Image

from configs import common
from kimi_jax import config_io
from kimi_jax.data import images, loader, media, media_sources, words
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.errors import UserError

SHOWN = 259  # the placeholder
BYTES = ByteTokenizer()


def make(*overrides: str):
    values = common.base()
    values.model.vision = common.vision()
    values.train.update(seq_len=16, batch_size=4, row_patches=32, row_items=3, steps=8)
    values.data.update(sources=("words:64",), validation_fraction=0.25)
    return config_io.from_dict(values, overrides)


def load(cfg, tmp_path) -> loader.Data:
    return loader.load_data(cfg, tmp_path)


def test_placeholders_expand_to_merged_patches():
    got = media.expand(np.array([1, 9, 2, 9]), np.array([[1, 4, 6], [3, 4, 4]]), 9, 2)
    assert got.tolist() == [1, *[9] * 6, 2, *[9] * 4]
    with pytest.raises(UserError, match=r"1 placeholders \(token 9\) for 2 images"):
        media.expand(np.array([1, 9]), np.ones((2, 3), int), 9, 2)
    assert media.expand(np.array([1, 2]), np.zeros((0, 3)), 9, 2).tolist() == [1, 2]


def test_rows_show_what_their_text_says(tmp_path):
    """Whole documents, each with the patches of its picture; text alone weighs."""
    cfg, drawn = make(), {}
    vision = cfg.model.vision
    for i in range(64):
        size = images.fit(words.HEIGHT, words.WIDTH, vision)
        pixels, _ = images.to_patches(words.draw(0, i), size, vision)
        drawn[pixels.tobytes()] = words.number(0, i)
    batch = load(cfg, tmp_path).train[0]
    assert batch["patches"].shape == (4, 32, 588)
    for row in range(4):
        tokens, targets = batch["tokens"][row], batch["targets"][row]
        here = tokens == SHOWN
        items = int(here.sum()) // 2
        assert (batch["grids"][row, :items] == (1, 2, 4)).all()
        assert not batch["grids"][row, items:].any()
        assert not batch["patches"][row, 8 * items :].any() and 1 <= items <= 3
        starts = np.flatnonzero(tokens == BYTES.bos)
        assert len(starts) == items
        for n, start in enumerate(starts):
            end = start + int((batch["segment_ids"][row] == n + 1).sum())
            text = BYTES.decode(targets[start + 2 : end])
            assert drawn[batch["patches"][row, 8 * n : 8 * n + 8].tobytes()] == text
        weighs = (batch["segment_ids"][row] > 0) & (targets != SHOWN)
        np.testing.assert_array_equal(batch["weights"][row], weighs)


def loader_patches(cfg, frames):
    from kimi_jax.data import images

    size = images.fit(*frames.shape[1:3], cfg.model.vision)
    return images.to_patches(frames, size, cfg.model.vision)


def test_every_document_is_seen_once_an_epoch(tmp_path):
    data = load(make(), tmp_path)
    (pool,) = data.train.parts
    batch = pool.read(np.arange(pool.windows), pool.windows)
    documents = (batch["tokens"] == BYTES.bos).sum()
    text = data.validation
    held_out = sum((text[i]["tokens"] == BYTES.bos).sum() for i in range(len(text)))
    assert documents + held_out == 64 and held_out > 4


def test_readers_share_rows_and_seeds_repeat_them(tmp_path):
    cfg = make()
    whole = load(cfg, tmp_path).train[3]
    halves = [loader.Reader(load(cfg, tmp_path).train, i, 2)[3] for i in (0, 1)]
    for name, x in whole.items():
        np.testing.assert_array_equal(x, np.concatenate([h[name] for h in halves]))
    other = load(make("data.seed=1"), tmp_path).train[3]
    assert (other["patches"] != whole["patches"]).any()


def test_text_and_pictures_mix_in_one_batch(tmp_path):
    (tmp_path / "a.txt").write_text("some words. " * 300)
    (tmp_path / "b.txt").write_text("other words. " * 300)
    cfg = make(f"data.sources=words:64,{tmp_path}", "data.mixture=((0, 1, 1),)")
    train = load(cfg, tmp_path / "tokens").train
    shown = [(train[step]["tokens"] == SHOWN).any(axis=1) for step in range(4)]
    assert 5 <= np.sum(shown) <= 11  # about half of 16 rows
    batch = train[0]
    assert not batch["grids"][~shown[0]].any()
    assert (batch["weights"][~shown[0]] > 0).mean() > 0.9


def test_text_alone_gives_the_batches_that_it_gave(tmp_path):
    (tmp_path / "a.txt").write_text("some words. " * 300)
    (tmp_path / "b.txt").write_text("other words. " * 300)
    text = ("train.row_patches=0", "train.row_items=0", f"data.sources={tmp_path}")
    batch = load(make(*text), tmp_path / "tokens").train[0]
    assert list(batch) == ["tokens", "targets", "segment_ids", "weights"]


def test_longer_windows_have_more_room(tmp_path):
    longer = load(make(), tmp_path).validation.at(32, 2)
    assert longer[0]["patches"].shape == (2, 64, 588)
    assert longer[0]["grids"].shape == (2, 6, 3)


@pytest.fixture
def pairs(tmp_path):
    """A folder with pictures; lines -> the source of a .jsonl file there."""
    for i in range(5):
        Image.new("RGB", (28 + 28 * (i % 2), 28), (i, 0, 0)).save(tmp_path / f"{i}.png")

    def write(*lines) -> str:
        rows = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
        return f"images:{tmp_path}/pairs.jsonl"

    return write


def store(source: str, *overrides: str) -> media.MediaStore:
    return media_sources.load_store(source, BYTES, make(*overrides))


def test_pairs_hold_images_and_clips(pairs):
    both = {"text": "a <image>b<image>", "images": ["0.png", ["2.png", "4.png"]]}
    made = store(pairs(both, {"text": "none", "images": []}))
    at = made.offsets_M
    a, b = (made.tokens_N[at[i] : at[i + 1]].tolist() for i in range(2))
    assert a == [BYTES.bos, *b"a ", SHOWN, *b"b", SHOWN, BYTES.eod]
    assert b == [BYTES.bos, *b"none", BYTES.eod]
    assert made.needs_D2.tolist() == [[12, 2], [0, 0]]
    batch = {
        "targets": np.zeros((1, 4), int),
        "weights": np.ones((1, 4)),
        "patches": np.zeros((1, 32, 588), np.float32),
        "grids": np.zeros((1, 3, 3), np.int32),
    }
    made.finish(batch, 0, [0])
    assert batch["grids"][0].tolist() == [[1, 2, 2], [2, 2, 2], [0, 0, 0]]
    red = (batch["patches"][0, :, 0] + 1) * 127.5
    assert red[[0, 4, 8]].round().tolist() == [0, 2, 4]


def test_an_altered_picture_is_other_data(pairs, tmp_path):
    line = {"text": "<image>a", "images": ["0.png"]}
    source = pairs(line, line)
    first = store(source).digest
    assert store(source).digest == first
    Image.new("RGB", (28, 28), "white").save(tmp_path / "0.png")
    assert store(source).digest != first


GOOD = {"text": "<image>", "images": ["0.png"]}


@pytest.mark.parametrize(
    ("line", "words_"),
    [
        ("{", "line 2: must be"),
        ({"text": "a"}, "line 2: must be"),
        (
            {"text": "a", "images": ["0.png"]},
            r"line 2: the text has 0 .* 1 im",
        ),
        ({"text": "<image>", "images": ["9.png"]}, "9.png: No such file"),
        ({"text": "<image>", "images": ["pairs.jsonl"]}, "pairs.jsonl is no image"),
        ({"text": "<image>", "images": [["0.png", "1.png"]]}, "differ in size"),
        ({"text": "<image>", "images": [["0.png"] * 5]}, "5 frames, .*max_frames=4"),
        ({"text": "<image>", "images": [[]]}, "a clip without frames"),
        ({"text": "a" * 20, "images": []}, "train.seq_len=21, which is 16"),
        ({"text": "<image>" * 4, "images": ["0.png"] * 4}, "row_items=4, which is 3"),
    ],
)
def test_bad_lines_are_named(pairs, tmp_path, line, words_):
    source = pairs(GOOD, line, GOOD)
    with pytest.raises(UserError, match=words_):
        load(make(f"data.sources={source}"), tmp_path / "tokens")


def test_sources_need_a_place_for_images(pairs):
    source = pairs(GOOD, GOOD)
    with pytest.raises(UserError, match=r"config.model.vision is none; use a config"):
        media_sources.load_store(source, BYTES, config_io.from_dict(common.base()))
    with pytest.raises(UserError, match=r"config.train.row_patches=0; set it"):
        store(source, "train.row_patches=0", "train.row_items=0")
    with pytest.raises(UserError, match=r"placeholder=65: the tokenizer 'bytes' uses"):
        store(source, "model.vision.placeholder=65")
    with pytest.raises(UserError, match="at least 2 are needed"):
        store(pairs(GOOD))
    with pytest.raises(UserError, match="write words:NUMBER"):
        store("words:many")
