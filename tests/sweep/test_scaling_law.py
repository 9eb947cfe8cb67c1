"""Fits find the truth they were given; their intervals hold it as often as they say."""

import numpy as np
import pytest

from kimi_jax.sweep import scaling_law as law

# Nine runs, at five computes.
COMPUTE = np.array([1e17, 1e17, 3e17, 3e17, 1e18, 1e18, 3e18, 1e19, 1e19])


def test_a_power_law_without_noise_is_found_exactly():
    fit = law.fit_power(COMPUTE, 1.891e1 * COMPUTE**-0.057)
    assert fit.exponent == pytest.approx(0.057, rel=1e-9)
    assert fit.coefficient == pytest.approx(18.91, rel=1e-8)
    assert fit.floor == 0.0 and fit.freedom == 7


def test_an_offset_law_without_noise_is_found_exactly():
    fit = law.fit_offset(COMPUTE, 1.2 + 400.0 * COMPUTE**-0.15)
    assert fit.exponent == pytest.approx(0.15, rel=1e-5)
    assert fit.floor == pytest.approx(1.2, rel=1e-5)
    assert fit.coefficient == pytest.approx(400.0, rel=1e-3)
    ahead = np.array([1e21])
    truth = 1.2 + 400.0 * ahead**-0.15
    np.testing.assert_allclose(law.predict(fit, ahead), truth, rtol=1e-6)


def test_the_published_fits_give_the_published_multiplier():
    """Attention Residuals report: 1.25 times the compute at 5.6 PFLOP/s-days."""
    day = 1e15 * 86400
    days = COMPUTE / 1e18  # the rows do not matter, without noise
    base, block = (
        law.fit_power(days * day, a * days**-b)
        for a, b in ((1.891, 0.057), (1.870, 0.058))
    )
    gain = law.compute_multiplier(base, block, 5.6 * day)
    assert gain.value == pytest.approx(1.254, abs=5e-4)
    assert gain.low == pytest.approx(gain.value, rel=1e-5)
    back = law.compute_multiplier(block, base, 5.6 * day)
    assert back.value == pytest.approx(1 / 1.254, abs=5e-3)


@pytest.mark.parametrize(
    ("fit", "truth"),
    [
        (law.fit_power, lambda c: 30.0 * c**-0.06),
        (law.fit_offset, lambda c: 1.0 + 3e3 * c**-0.2),
    ],
    ids=["power", "offset"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(fit, truth):
    """95 % of 200: the count is binomial, 190 with a deviation of 3.1."""
    rng = np.random.default_rng(0)
    at = np.array([1e17, 1e18, 3e19])  # the last beyond the data
    inside = np.zeros(len(at))
    for _ in range(200):
        noisy = truth(COMPUTE) * np.exp(0.002 * rng.normal(size=len(COMPUTE)))
        low, high = law.band(fit(COMPUTE, noisy), at)
        inside += (low < truth(at)) & (truth(at) < high)
    assert (inside > 200 * 0.95 - 4 * 3.1).all(), inside
    assert (inside < 200).all(), inside


def test_multipliers_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        base, other = (
            law.fit_power(c, 30.0 * (gain * c) ** -0.06 * np.exp(0.002 * noise))
            for gain in (1.0, 1.25)
            for c, noise in [(COMPUTE, rng.normal(size=len(COMPUTE)))]
        )
        gain = law.compute_multiplier(base, other, 1e18)
        hits += gain.low < 1.25 < gain.high
    # Taking the smaller degrees of freedom makes the interval a little wide.
    assert 200 * 0.95 - 4 * 3.1 < hits <= 200


def test_quantiles_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.3027, 5: 2.5706, 10: 2.2281, 1000: 1.9623}
    for freedom, value in table.items():
        assert law.t_quantile(freedom) == pytest.approx(value, abs=1e-4)


def test_bands_are_wider_outside_the_data():
    rng = np.random.default_rng(2)
    noisy = 30.0 * COMPUTE**-0.06 * np.exp(0.01 * rng.normal(size=len(COMPUTE)))
    low, high = law.band(law.fit_power(COMPUTE, noisy), np.array([1e18, 1e21]))
    width = np.log(high / low)
    assert width[1] > 2 * width[0] > 0


@pytest.mark.parametrize(
    ("fit", "compute", "loss", "words"),
    [
        (law.fit_power, [1e17, 1e18], [2.0, 1.9], "at least 3 runs"),
        (law.fit_power, [1e17] * 4, [2.0] * 4, "at 1 computes"),
        (law.fit_power, [1e17, 1e18, 1e19], [1.0, 2.0, 3.0], "does not fall"),
        (law.fit_offset, [1e17, 1e18, 1e19], [3.0, 2.0, 1.5], "at least 4 runs"),
        (law.fit_offset, [1e17, 1e18, 1e19, 1e20], [1.0, 2.0, 3.0, 4.0], "not fall"),
        (law.fit_power, [0.0, 1e18, 1e19], [1.0, 2.0, 3.0], "must be positive"),
    ],
)
def test_what_cannot_be_fitted_is_refused(fit, compute, loss, words):
    with pytest.raises(ValueError, match=words):
        fit(np.array(compute), np.array(loss))


def test_a_loss_below_the_floor_has_no_multiplier():
    base = law.fit_offset(COMPUTE, 1.9 + 400.0 * COMPUTE**-0.15)
    other = law.fit_offset(COMPUTE, 1.2 + 400.0 * COMPUTE**-0.15)
    with pytest.raises(ValueError, match="never reaches"):
        law.compute_multiplier(base, other, 1e21)
