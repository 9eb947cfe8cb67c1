"""Our numbers against those of the released code, on the golden checkpoints."""

import dataclasses

import numpy as np
import pytest

from kimi_jax.interop import parity
from kimi_jax.interop.load import load_model
from tests.interop import goldens


def measured(name):
    folder = goldens.FOLDER / name
    expected = parity.read_expected(folder / "expected.npz")
    model, variables = load_model(folder, dtype="float32")
    kda = dataclasses.replace(model.kda, chunk_size=16)
    model = dataclasses.replace(model, dtype="float32", kda=kda)
    return model, variables, expected


def test_kimi_linear_is_the_released_code():
    model, variables, expected = measured("kimi_linear_tiny")
    ours = parity.logits(model, variables, expected)
    found = parity.compare(ours, expected["logits"])
    assert found.max_abs_err < 2e-5 and found.top1 == 1.0 and found.kl < 1e-11
    layer, errors = parity.first_deviation(model, variables, expected, 1e-5)
    assert layer is None and [*errors] == [0, 2, 4]
    # An error in the middle is found there.
    off = dict(expected) | {"hidden_2": expected["hidden_2"] + 1e-3}
    assert parity.first_deviation(model, variables, off, 1e-4)[0] == 2


@pytest.mark.parametrize("name", ["k3_tiny", "k3_tiny_mxfp4"])
def test_k3_is_the_released_code(name):
    """These two amplify rounding: a few tokens of ours and of the expected file are
    each about 1e-4 from what float64 computes (docs/interop.md), so the largest error
    alone would test luck. A wrong epsilon anywhere gives errors above 1e-3.
    """
    model, variables, expected = measured(name)
    ours = parity.logits(model, variables, expected)
    found = parity.compare(ours, expected["logits"])
    assert found.mean_abs_err < 1e-5 and found.kl < 1e-10 and found.top1 == 1.0
    error = np.abs(ours - expected["logits"])
    assert np.mean(error > 1e-4) < 1e-3 and found.max_abs_err < 4e-4


def test_the_comparison_itself():
    a = np.array([[0.0, 1.0], [2.0, 0.0]])
    b = np.array([[0.0, 1.0], [0.0, 2.0]])
    found = parity.compare(a, b)
    p = np.exp(2) / (1 + np.exp(2))
    assert found.max_abs_err == 2.0 and found.mean_abs_err == 1.0 and found.top1 == 0.5
    assert found.kl == pytest.approx((p - (1 - p)) * 2 / 2)
    assert parity.compare(a * np.nan, b).max_abs_err == np.inf
