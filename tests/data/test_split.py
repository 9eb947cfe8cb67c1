"""Whole documents are held out, and stay so when text is added."""

import numpy as np
import pytest

from kimi_jax.data.split import held_out


def test_about_the_fraction_is_held_out() -> None:
    held = held_out(2000, 0.1, seed=0)
    # 2000 draws at 0.1: 200 expected, standard deviation 13.4.
    assert abs(held.sum() - 200) < 4 * 13.4
    np.testing.assert_array_equal(held_out(2000, 0.1, seed=0), held)
    assert (held_out(2000, 0.1, seed=1) != held).any()


def test_appended_documents_move_no_old_ones() -> None:
    np.testing.assert_array_equal(
        held_out(500, 0.1, seed=3)[:400], held_out(400, 0.1, seed=3)
    )


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_few_documents_leave_neither_side_empty(fraction: float) -> None:
    for seed in range(20):
        assert held_out(2, fraction, seed).sum() == 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_impossible_fractions(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected above 0 and below 1"):
        held_out(2, fraction, seed=0)


def test_one_document_cannot_be_split_here() -> None:
    with pytest.raises(ValueError, match="expected at least 2"):
        held_out(1, 0.5, seed=0)
