"""Credit from rewards, against numbers that were worked out by hand."""

import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.rl import advantages as lib
from tests.rl.trajectories import Trajectory, Turn

REWARDS = [1.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("mean", [0, -1, -1, 2]),
        ("mean_std", np.array([0, -1, -1, 2]) / np.sqrt(1.5)),
        ("leave_one_out", [0, -4 / 3, -4 / 3, 1 - 1 / 3 + 2]),
        ("none", REWARDS),
    ],
)
def test_kinds(kind, want):
    got = lib.advantages(REWARDS, kind)
    np.testing.assert_allclose(got, want, atol=1e-15)
    if kind == "leave_one_out":
        others = [np.mean(np.delete(REWARDS, i)) for i in range(4)]
        np.testing.assert_allclose(got, np.array(REWARDS) - others, atol=1e-15)


@pytest.mark.parametrize("kind", lib.KINDS)
def test_a_bad_reward_spoils_no_other(kind):
    got = lib.advantages([*REWARDS, np.nan, -np.inf], kind)
    np.testing.assert_allclose(got[:4], lib.advantages(REWARDS, kind))
    assert np.isnan(got[4:]).all()
    assert np.isnan(lib.advantages([np.nan], kind)).all()


@pytest.mark.parametrize("kind", [k for k in lib.KINDS if k != "none"])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [5.0], []])
def test_equal_rewards_teach_nothing(kind, rewards):
    assert not lib.advantages(rewards, kind).any()
    assert lib.is_flat([[r] for r in rewards])


def test_turns_are_compared_with_those_who_came_as_far():
    rewards = [[1.0, 0.0, 2.0], [0.0, 1.0], [2.0]]
    # Returns: [3, 2, 2], [1, 1], [2]; the means of the turns are 2, 1.5 and 2.
    got = lib.turn_advantages(rewards, "mean")
    for own, want in zip(got, ([1, 0.5, 0], [-1, -0.5], [0]), strict=True):
        np.testing.assert_allclose(own, want, atol=1e-15)


def trajectory(group, rewards, tokens=2):
    turns = [Turn(3 * i, 3 * i + tokens, r) for i, r in enumerate(rewards, start=1)]
    return Trajectory(group, [], turns, [])


def test_groups_are_apart_and_credit_is_mixed():
    batch = [
        trajectory(7, [0.0, 1.0]),
        trajectory(8, [1.0]),
        trajectory(7, [0.5, 0.0]),
        trajectory(8, [1.0]),
    ]
    found = lib.assign(batch, "mean", turn_credit=0.25)
    # Group 7: totals 1 and 0.5, returns [1, 1] and [0.5, 0].
    whole, own = 0.25, np.array([0.25, 0.5])
    np.testing.assert_allclose(found.advantages[0], 0.75 * whole + 0.25 * own)
    np.testing.assert_allclose(found.advantages[2], -0.75 * whole - 0.25 * own)
    assert found.flat.tolist() == [False, True, False, True]
    assert (found.groups, found.flat_groups) == (2, 1)
    plain = lib.assign(batch, "mean")
    np.testing.assert_allclose(plain.advantages[0], [0.25, 0.25])


def test_process_rewards_alone_may_differ():
    """Equal totals: flat, unless turns are compared."""
    batch = [trajectory(0, [1.0, 0.0]), trajectory(0, [0.0, 1.0])]
    assert lib.assign(batch, "mean").flat.all()
    assert not lib.assign(batch, "mean", turn_credit=0.5).flat.any()


def test_long_answers_lose_reward():
    assert [lib.penalty(n, 0.5, 10) for n in (0, 10, 15, 20, 99)] == [
        0,
        0,
        0.25,
        0.5,
        0.5,
    ]
    batch = [trajectory(0, [1.0]), trajectory(0, [1.0], tokens=3)]
    found = lib.assign(batch, "mean", length_penalty=1.0, length_budget=2)
    np.testing.assert_allclose(np.concatenate(found.advantages), [0.25, -0.25])
    assert batch[1].turns[0].reward == 1.0  # what was measured stays


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lib.advantages([1.0], "median"), "advantage='median': choose one of"),
        (lambda: lib.assign([], "mean", turn_credit=1.5), "turn_credit=1.5"),
        (lambda: lib.penalty(1, 1.0, 0), "length_budget=0"),
    ],
)
def test_wrong_settings_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
