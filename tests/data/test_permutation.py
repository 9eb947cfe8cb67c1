"""The permutation that orders an epoch, and hashed draws."""

import numpy as np
import pytest

from kimi_jax.data.permutation import permute, uniform


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4096, 10_007])
def test_permutation_is_a_bijection(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (2**63, 10**6)]:
        order = permute(np.arange(size), size, seed, epoch)
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_permutation_does_not_depend_on_what_is_asked_with_it() -> None:
    order = permute(np.arange(1000), 1000, 5, 2)
    for index in (0, 1, 500, 999):
        assert permute(np.array([index]), 1000, 5, 2) == order[index]


def test_permutation_of_a_huge_range_is_spread_and_repeats_nothing() -> None:
    size = 2**62
    index = np.r_[np.arange(500), size - 1 - np.arange(500)]
    order = permute(index, size, 0, 0)
    assert len(np.unique(order)) == 1000
    assert order.min() >= 0 and order.max() < size
    # Uniform on [0, 1): mean 1/2 with a standard error of 0.29 / sqrt(1000).
    assert abs((order / size).mean() - 0.5) < 4 * 0.29 / 1000**0.5


def test_orders_look_random() -> None:
    size, orders = 50, 2000
    drawn = np.array([permute(np.arange(size), size, 0, e) for e in range(orders)])
    # Where index i lands is uniform, for every i: chi-square with 49 degrees.
    counts = np.array([np.bincount(drawn[:, i], minlength=size) for i in range(size)])
    chi_square = ((counts - orders / size) ** 2 / (orders / size)).sum(axis=1)
    assert chi_square.max() < 49 + 5 * (2 * 49) ** 0.5
    # Neighbours are not kept: a step from i to i + 1 is uniform over the other 49.
    steps = np.diff(drawn, axis=1) % size
    counts = np.bincount(steps.ravel(), minlength=size)[1:]
    expected = steps.size / (size - 1)
    assert np.abs(counts - expected).max() < 5 * expected**0.5
    # Two epochs share one position on average, as independent orders do.
    shared = (drawn[1:] == drawn[:-1]).sum(axis=1)
    assert abs(shared.mean() - 1) < 5 / orders**0.5


def test_order_is_fixed_for_ever() -> None:
    # A change of these numbers would change what every resumed run reads next.
    expected = [663, 993, 462, 881, 33, 532, 780, 327]
    assert permute(np.arange(8), 1000, 7, 3).tolist() == expected


def test_every_part_of_the_key_counts() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (0, 0, 1), (0, 1, 1), (1, 0, 1)]
    orders = {tuple(permute(np.arange(100), 100, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_draws_are_uniform_and_belong_to_their_index() -> None:
    draws_N = uniform(np.arange(10_000), 3)
    assert uniform(np.array([77]), 3) == draws_N[77]
    counts = np.histogram(draws_N, bins=20, range=(0, 1))[0]
    # Chi-square with 19 degrees of freedom.
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 5 * 38**0.5
    # Another seed is another draw: correlation has a standard error of 0.01.
    assert abs(np.corrcoef(draws_N, uniform(np.arange(10_000), 4))[0, 1]) < 0.05
