"""The token recurrence against an independent one in numpy."""

import numpy as np
import pytest

from tests.pallas_kernels import kda_cases as cases

TIME = 26
SEGMENT_IDS = np.array(
    [
        [0, 0, 3, 3, 3, 0, 3, 3, 1, 1, 0, 0, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 0, 0],
        [5] * 26,
    ]
)
SETTINGS = [
    {},
    {**cases.IN_KERNEL, "lower_bound": -5.0},
    {**cases.IN_KERNEL, "allow_neg_eigval": True, "scale": 0.7},
]


def arrays(settings):
    if settings:
        return cases.raw(TIME)
    return cases.prepared("unbounded", TIME)


@pytest.mark.parametrize(
    ("settings", "segment_ids"),
    [(SETTINGS[0], None), *((settings, SEGMENT_IDS) for settings in SETTINGS)],
    ids=["whole", "packed", "packed, bounded gate", "packed, softplus gate"],
)
def test_matches_numpy_in_value_and_gradient(settings, segment_ids):
    x = arrays(settings)
    got = cases.run(x, segment_ids, implementation="reference", **settings)
    o, state = cases.oracle(x, segment_ids, **settings)
    np.testing.assert_allclose(got["o"], o, atol=1e-13)
    np.testing.assert_allclose(got["state"], state, atol=1e-13)

    # Central differences of the oracle along one direction through all inputs.
    direction = {name: cases.draw(20, *value.shape) for name, value in x.items()}

    def loss(step):
        moved = {name: value + step * direction[name] for name, value in x.items()}
        outputs = cases.oracle(moved, segment_ids, **settings)
        pairs = zip(outputs, cases.cotangents(TIME), strict=True)
        return sum(np.sum(a * b) for a, b in pairs)

    step = 1e-5
    expected = (loss(step) - loss(-step)) / (2 * step)
    slope = sum(np.sum(got[f"d{name}"] * direction[name]) for name in x)
    # The error of a central difference is of order step^2.
    np.testing.assert_allclose(slope, expected, rtol=1e-7)
