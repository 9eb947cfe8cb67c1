"""The closed form of the mixture against counting row after row."""

import collections

import numpy as np
import pytest

from kimi_jax.data.mixture import Phase, Schedule, combine, make_schedule

MIXTURES = {
    "one part": [[(0.0, 1.0)]],
    "two": [[(0.0, 0.7, 0.3)]],
    "stages": [[(0.0, 0.7, 0.3, 0.0), (0.35, 0.0, 0.5, 0.5), (0.8, 1, 2, 3)]],
    "small": [[(0.0, 0.001, 0.9, 0.0004, 0.0986)]],
    "product": [[(0.0, 0.6, 0.4), (0.5, 1.0, 0.0)], [(0.0, 1, 1, 1), (0.7, 0, 0, 1)]],
}
RUN_ROWS = 40_000


def schedule_of(name: str) -> tuple[list[Phase], Schedule]:
    phases = combine(*(MIXTURES[name] + [[]])[:2])
    return phases, make_schedule(phases, RUN_ROWS)


def test_phases_combine() -> None:
    phases, _ = schedule_of("product")
    assert [phase.fraction for phase in phases] == [0.0, 0.5, 0.7]
    for phase, want in zip(
        phases, [[0.2] * 3 + [0.4 / 3] * 3, [1 / 3] * 3 + [0] * 3, [0, 0, 1, 0, 0, 0]],
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(phase.weights_P, want, atol=1e-15)
    (phase,) = combine([], [])
    assert phase.fraction == 0.0 and phase.weights_P.tolist() == [1.0]


@pytest.mark.parametrize("name", MIXTURES)
def test_closed_form_equals_counting(name: str) -> None:
    """Slow reference: walk all rows from the first, and count."""
    phases, schedule = schedule_of(name)
    blocks = RUN_ROWS // schedule.block_rows + 3
    seen: collections.Counter[int] = collections.Counter()
    shares_P = np.zeros(schedule.parts)  # rows that are due in this phase
    phase, at_phase_start_P = 0, np.zeros(schedule.parts)
    for block in range(blocks):
        now = sum(
            round(p.fraction * RUN_ROWS / schedule.block_rows) <= block for p in phases
        )
        before_P = np.array([seen[p] for p in range(schedule.parts)])
        if now - 1 != phase:
            phase, shares_P, at_phase_start_P = now - 1, 0 * shares_P, before_P
        np.testing.assert_array_equal(schedule.before(block), before_P)
        part_R, count_R = schedule.draw(block, seed=5)
        for part, count in zip(part_R.tolist(), count_R.tolist(), strict=True):
            assert count == seen[part]
            seen[part] += 1
        weights_P = phases[phase].weights_P
        shares_P = shares_P + weights_P * schedule.block_rows
        got_P = np.array([seen[p] for p in range(schedule.parts)]) - at_phase_start_P
        assert np.abs(got_P - shares_P).max() < 1 + 1e-6
        assert not np.isin(part_R, np.flatnonzero(weights_P == 0)).any()
    planned_P = schedule.planned(blocks * schedule.block_rows)
    off_P = planned_P - [seen[p] for p in range(schedule.parts)]
    assert np.abs(off_P).max() < len(phases)


@pytest.mark.parametrize("name", MIXTURES)
def test_any_rows_can_be_asked_for(name: str) -> None:
    _, schedule = schedule_of(name)
    part_B, count_B = schedule.rows(np.arange(3000), seed=5)
    chosen = np.array([2999, 0, 64, 63, 1500, 1500, 128])
    part, count = schedule.rows(chosen, seed=5)
    np.testing.assert_array_equal(part, part_B[chosen])
    np.testing.assert_array_equal(count, count_B[chosen])


def test_blocks_hold_two_rows_of_the_smallest_part() -> None:
    assert schedule_of("two")[1].block_rows == 64
    assert schedule_of("small")[1].block_rows == 8192


def test_parts_are_shuffled_inside_a_block() -> None:
    _, schedule = schedule_of("two")
    draws = np.array([schedule.draw(block, 0)[0] for block in range(500)])
    # Every place of a block has the second part 0.3 of the time; sd 0.02.
    assert np.abs(draws.mean(axis=0) - 0.3).max() < 5 * 0.0205
    assert (draws[0] != schedule.draw(0, 1)[0]).any()


def test_far_rows_are_exact() -> None:
    _, schedule = schedule_of("stages")
    block = 10**13
    step_P = schedule.before(block + 1) - schedule.before(block)
    assert step_P.sum() == 64 and step_P.min() >= 0
    assert schedule.before(block).sum() == block * 64


def test_random_weights_never_take_a_row_back() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        weights = rng.dirichlet(np.full(rng.integers(2, 9), 0.3)) + 1e-3
        weights[rng.random(len(weights)) < 0.2] = 0
        weights[0] += 0.01
        schedule = make_schedule(combine([(0.0, *weights)], []), 10**6)
        before = np.array([schedule.before(block) for block in range(200)])
        assert (np.diff(before, axis=0)[:, weights > 0] >= 1).all()
        assert not before[:, weights == 0].any()


def test_a_share_too_small() -> None:
    with pytest.raises(
        ValueError, match=r"a share of 1e-06, allowed are 0 and 3.1e-05"
    ):
        make_schedule(combine([(0.0, 1.0, 1e-6)], []), 1000)
