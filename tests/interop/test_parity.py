"""Our numbers against those of the released code, on the golden checkpoints."""

import dataclasses

import jax
import numpy as np
import pytest

from kimi_jax.interop import parity
from kimi_jax.interop.load import load_model
from tests.interop import goldens


def loaded(name, dtype):
    folder = goldens.FOLDER / name
    model, variables = load_model(folder, dtype=dtype)
    kda = dataclasses.replace(model.kda, chunk_size=16)
    model = dataclasses.replace(model, dtype=dtype, kda=kda)
    return model, variables, parity.read_expected(folder / "expected.npz")


def measured(name, dtype):
    """Our logits, and the expected ones."""
    model, variables, expected = loaded(name, dtype)
    return parity.logits(model, variables, expected), expected["logits"]


def test_kimi_linear_is_the_released_code():
    model, variables, expected = loaded("kimi_linear_tiny", "float32")
    ours = parity.logits(model, variables, expected)
    found = parity.compare(ours, expected["logits"])
    assert found.max_abs_err < 2e-5 and found.top1 == 1.0 and found.kl < 1e-11
    layer, errors = parity.first_deviation(model, variables, expected, 1e-5)
    assert layer is None and [*errors] == [0, 2, 4]
    # An error in the middle is found there.
    off = dict(expected) | {"hidden_2": expected["hidden_2"] + 1e-3}
    assert parity.first_deviation(model, variables, off, 1e-4)[0] == 2


# These checkpoints amplify rounding. Their expected values, which float32 made, are
# this far from what float64 computes; a wrong epsilon anywhere gives more than 1e-3.
ROUNDED = {"k3_tiny": 1.1e-4, "k3_tiny_mxfp4": 6e-5}


@pytest.mark.parametrize("name", ROUNDED)
def test_k3_in_float64_is_the_released_code(name):
    with jax.enable_x64(True):
        ours, expected = measured(name, "float64")
    found = parity.compare(ours, expected)
    assert found.max_abs_err < ROUNDED[name] and found.mean_abs_err < 5e-6
    assert np.sum(np.abs(ours - expected) > 1e-4) <= 1
    assert found.kl < 2e-11 and found.top1 == 1.0


def test_k3_in_float32_is_as_close_as_float32_is():
    """A few tokens of ours and of the file are each about 1e-4 from float64, so the
    largest error alone would test luck (docs/interop.md)."""
    ours, expected = measured("k3_tiny", "float32")
    found = parity.compare(ours, expected)
    assert found.mean_abs_err < 1e-5 and found.kl < 1e-10 and found.top1 == 1.0
    error = np.abs(ours - expected)
    assert np.mean(error > 1e-4) < 1e-3 and found.max_abs_err < 4e-4


def test_the_comparison_itself():
    a = np.array([[0.0, 1.0], [2.0, 0.0]])
    b = np.array([[0.0, 1.0], [0.0, 2.0]])
    found = parity.compare(a, b)
    p = np.exp(2) / (1 + np.exp(2))
    assert found.max_abs_err == 2.0 and found.mean_abs_err == 1.0 and found.top1 == 0.5
    assert found.kl == pytest.approx((p - (1 - p)) * 2 / 2)
    assert parity.compare(a * np.nan, b).max_abs_err == np.inf
