"""Which tasks are drawn, after which successes."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from kimi_jax.config import TaskSampling
from kimi_jax.environments.environment import Task
from kimi_jax.errors import UserError
from kimi_jax.rl.task_sampler import Cell, TaskSampler, held_out

SETTINGS = TaskSampling(0.2, 0.8, floor=0.1, ema=0.5, length_threshold=0.6)
CELLS = [Cell("tools", d, n) for d in (1, 2) for n in (1024, 4096, 16384)]


def sampler(cells=CELLS, settings=SETTINGS, seed=3):
    return TaskSampler(cells, seed, settings)


def play(made, cell, rate):
    made.update(Task(*cell, 0), rate)


def test_weights_follow_success():
    made = sampler([Cell("tools", d, 1024) for d in range(6)])
    for cell, rate in zip(made.cells, (0.0, 0.1, 0.2, 0.8, 0.9), strict=False):
        play(made, cell, rate)
    # Never: the floor; half way to the band: 0.55; within: 1; nearly always: 0.55;
    # not tried yet: 1.
    want = np.array([0.1, 0.55, 1, 1, 0.55, 1])
    np.testing.assert_allclose(made.weights(), want / want.sum(), rtol=1e-12)
    counts = collections.Counter(task.difficulty for task in made.draw(420))
    for cell, share in zip(made.cells, want / want.sum(), strict=True):
        assert abs(counts[cell.difficulty] - 420 * share) <= 1


def test_success_is_a_running_mean():
    made = sampler()
    for rate in (0.5, 1.0, 0.0):
        play(made, CELLS[0], rate)
    assert made.success == {CELLS[0]: ((0.5 + 1.0) / 2 + 0.0) / 2}


def test_longer_tasks_are_unlocked_one_length_at_a_time():
    made = sampler()
    short = [CELLS[0], CELLS[3]]
    assert made.unlocked() == short
    assert {task.length for task in made.draw(50)} == {1024}
    play(made, CELLS[0], 0.59)
    assert made.unlocked() == short
    play(made, CELLS[0], 0.7)
    assert made.unlocked() == [CELLS[0], CELLS[1], CELLS[3]]
    for _ in range(5):
        play(made, CELLS[0], 0.0)
    assert CELLS[1] in made.unlocked()  # once unlocked, for good
    assert {task.length for task in made.draw(50)} == {1024, 4096}
    play(made, CELLS[1], 1.0)
    assert CELLS[2] in made.unlocked() and CELLS[4] not in made.unlocked()
    free = sampler(settings=dataclasses.replace(SETTINGS, length_threshold=0.0))
    assert free.unlocked() == CELLS


def test_tasks_are_new_and_never_held_out():
    made = sampler()
    train = [task for _ in range(200) for task in made.draw(10)]
    held = held_out(CELLS, 500)
    assert len({task.seed for task in train}) == 2000
    assert len(set(held)) == len(held) == 6 * 500
    assert not {task.seed for task in train} & {task.seed for task in held}
    assert held_out(CELLS[:1], 3) == held[:3]
    other = sampler(seed=4).draw(10)
    assert not {task.seed for task in other} & {task.seed for task in train}


def test_state_is_exact():
    made = sampler()
    for number in range(30):
        for task in made.draw(4):
            made.update(task, (number * 7 % 11) / 11)
    again = sampler()
    again.restore(json.loads(json.dumps(made.state())))
    assert again.success == made.success and again.unlocked() == made.unlocked()
    np.testing.assert_array_equal(again.weights(), made.weights())
    assert [again.draw(3) for _ in range(9)] == [made.draw(3) for _ in range(9)]
    with pytest.raises(UserError, match=r"seed=9, but .* seed=3"):
        sampler(seed=9).restore(made.state())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: sampler([]), "no tasks to draw"),
        (lambda: sampler([CELLS[0], CELLS[0]]), "named twice"),
        (lambda: play(sampler(), CELLS[0], float("nan")), "success_rate=nan"),
        (lambda: play(sampler(), Cell("x", 1, 2), 0.5), "not among the tasks"),
    ],
)
def test_unfit_values_are_refused(action, message):
    with pytest.raises(UserError, match=message):
        action()
