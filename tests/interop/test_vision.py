"""The golden checkpoint with a vision tower: features, logits, config."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from kimi_jax.interop import hf_config, load, parity
from kimi_jax.interop.entries import InteropError
from kimi_jax.modules import vision
from tests.interop import goldens
from tests.modules import vision_reference as reference

GOLDEN = goldens.FOLDER / "k3_tiny_vision"


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
    tokens_BT, _ = parity.shown(model, expected)
    here = np.flatnonzero(tokens_BT[0] == model.vision.placeholder)
    assert here.tolist() == [*range(3, 9), *range(16, 20)]
    got = parity.logits(model, variables, expected)
    found = parity.compare(got, expected["logits"])
    assert found.max_abs_err < 1e-4 and found.top1 == 1.0


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
