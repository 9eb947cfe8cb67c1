"""The golden checkpoint with a vision tower: features, logits, names, bytes, config."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from kimi_jax.interop import hf_config, load, parity, published
from kimi_jax.interop.entries import InteropError
from kimi_jax.interop.from_native import from_native
from kimi_jax.interop.to_native import to_native
from kimi_jax.modules import vision
from tests.modules import vision_reference as reference

GOLDEN = pathlib.Path("tests/golden/k3_tiny_vision")


@pytest.fixture(scope="module")
def golden():
    """(model in float32, variables, expected arrays)."""
    model, variables = load.load_model(GOLDEN)
    expected = parity.read_expected(GOLDEN / "expected.npz")
    return dataclasses.replace(model, dtype="float32"), variables, expected


def test_features_are_those_of_the_released_code(golden):
    model, variables, expected = golden
    _, media = parity.shown(model, expected)
    both = jax.jit(
        lambda variables: (
            vision.encode(model, variables["params"]["vision"], media),
            vision.features(model, variables, media),
        )
    )
    for got, name in zip(
        both(variables), ("vision_features", "image_features"), strict=True
    ):
        want = expected[name]
        np.testing.assert_allclose(got[0, : len(want)], want, rtol=0, atol=1e-5)


def test_the_numpy_definition_is_the_released_code(golden):
    model, variables, expected = golden
    params = variables["params"]["vision"]
    pixels, grids = expected["pixel_values"], expected["grid_thws"].tolist()
    merged = reference.encode(model.vision, params, pixels, grids)
    np.testing.assert_allclose(merged, expected["vision_features"], atol=1e-5)
    features = reference.project(model.vision, params, merged)
    np.testing.assert_allclose(features, expected["image_features"], atol=1e-5)


@pytest.mark.slow
def test_logits_are_those_of_the_released_code(golden):
    model, variables, expected = golden
    tokens_BT, media = parity.shown(model, expected)
    here = np.flatnonzero(tokens_BT[0] == model.vision.placeholder)
    assert here.tolist() == [*range(3, 9), *range(16, 20)]
    got = parity.logits(model, variables, tokens_BT, media)
    found = parity.compare(got, expected["logits"])
    assert found.max_abs_err < 1e-4 and found.top1 == 1.0


def test_a_round_trip_keeps_every_byte(tmp_path):
    to_native(GOLDEN, tmp_path / "ours", workers=1)
    from_native(tmp_path / "ours", tmp_path / "theirs", workers=1)
    ours, theirs = (tmp_path / "theirs", GOLDEN)
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
    files = (folder / "model.safetensors" for folder in (ours, theirs))
    got, want = map(split, files)
    assert got == want


def split(file: pathlib.Path) -> tuple[dict, bytes]:
    """Names, shapes, dtypes and places of the tensors of a file; their bytes."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header.pop("__metadata__", None)
    return header, raw[end:]


def test_every_tensor_has_one_entry():
    opened = published.open_published(GOLDEN)
    names = [name for entry in opened.arrays.values() for name in entry.published]
    assert sorted(names) == sorted(opened.tensors)


def test_the_config_is_read_and_written_back():
    values = json.loads((GOLDEN / "config.json").read_text())
    model = hf_config.parse(values).model
    assert model.vision.head_dim == 24 and model.vision.placeholder == 250
    made = hf_config.publish(model)
    assert made["vision_config"] == values["vision_config"]
    assert hf_config.parse(made).model == model


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("norm_type", "layernorm", 'only "rmsnorm" is supported'),
        ("merge_kernel_size", [2, 1], "only squares"),
        ("qkv_hidden_size", 49, "a multiple of vt_num_attention_heads=2"),
        ("text_hidden_size", 32, "must equal text_config.hidden_size=48"),
        ("mm_hidden_size", 16, "must equal vt_hidden_size=32"),
        ("pos_emb_kind", 1, "unknown field"),
        ("patch_size", None, "patch_size: missing"),
    ],
)
def test_other_towers_are_refused(field, value, words):
    values = json.loads((GOLDEN / "config.json").read_text())
    values["vision_config"][field] = value
    if value is None:
        del values["vision_config"][field]
    with pytest.raises(InteropError, match=words):
        hf_config.parse(values)


def test_placeholders_must_match_the_images(golden):
    model, _, expected = golden
    fewer = {**expected, "input_ids": expected["input_ids"][:, :8]}
    with pytest.raises(ValueError, match=r"1 placeholders \(token 250\) for 2 images"):
        parity.shown(model, fewer)
    with pytest.raises(InteropError, match="takes a checkpoint with a vision_config"):
        parity.shown(dataclasses.replace(model, vision=None), expected)
