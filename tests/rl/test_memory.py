"""What is learned of what has finished, and what waits: pure bookkeeping."""

import dataclasses
import json

import pytest

from kimi_jax.environments.environment import Task
from kimi_jax.rl.memory import Memory, shuffled
from kimi_jax.rl.task_sampler import Cell
from tests.rl.test_records import trajectory
from tests.test_config_rl import config_io, values

CELLS = [Cell("tools", 1, 64), Cell("tools", 2, 64)]


def make(**changes):
    settings = {"group_size": 2, "groups": 3, "max_staleness": 2, **changes}
    rl = config_io.from_dict(values()).rl
    return Memory(dataclasses.replace(rl, **settings), CELLS, seed=1)


def group(number, *rewards, version=0):
    return [
        dataclasses.replace(
            trajectory(reward=reward, member=i),
            task=Task("tools", 1, 64, number),
            group=number,
            routes=None,
            versions=[version] * 12,
        )
        for i, reward in enumerate(rewards)
    ]


def test_whole_groups_that_differ_are_learned():
    memory = make()
    assert [task.environment for task in memory.draw()] == ["tools"] * 3
    late, *rest = group(0, 1.0, 0.0)
    lesson = memory.lesson([*rest, *group(1, 1.0, 1.0), *group(2, 0.0, 1.0)])
    # Group 0 waits for its other member, and group 1 has nothing to tell.
    got = [(e.trajectory.group, e.advantages) for e in lesson.entries]
    assert got == [(2, [-0.5, -0.5]), (2, [0.5, 0.5])]
    assert [len(e.advantages) for e in lesson.finished] == [0, 0, 0, 2, 2]
    assert lesson.numbers["zero_variance"] == 0.5 and lesson.numbers["groups"] == 2
    memory.learned(lesson, left=[1])
    again = make()
    again.restore(json.loads(json.dumps(memory.state())))
    assert again.version == 1
    for one in (memory, again):
        lesson = one.lesson([late])
        # What had no room comes first; its group is not compared again.
        got = [(e.trajectory.group, e.trajectory.member) for e in lesson.entries]
        assert got == [(2, 1), (0, 0), (0, 1)]
        assert lesson.entries[0].advantages == [0.5, 0.5]
    assert memory.draw() == again.draw()


def test_what_is_too_old_is_dropped_and_old_groups_come_again():
    memory = make(reuse=0.5, max_staleness=1)
    for version in range(4):
        fresh = group(version, 1.0, 0.0, version=version)
        if version == 3:  # one that took three iterations to write
            fresh += group(9, 1.0, 0.0, version=0)
        lesson = memory.lesson(fresh)
        learned = [e.trajectory.group for e in lesson.entries]
        assert learned[:2] == [version] * 2
        assert set(learned[2:]) <= {version - 1} and lesson.numbers["groups"] >= 1
        memory.learned(lesson, left=[])
    assert lesson.numbers["dropped_stale"] == 2
    assert lesson.numbers["reused_trajectories"] == 2


def test_rewards_of_the_controls():
    groups = [group(n, 1.0, 0.0) for n in range(20)]
    dealt = shuffled(groups, (1, 2))
    rewards = [t.reward for g in dealt for t in g]
    assert sum(rewards) == 20 and rewards != [1.0, 0.0] * 20
    assert dealt == shuffled(groups, (1, 2)) != shuffled(groups, (1, 3))
    # Success, which the sampler goes by, stays that of the task.
    assert [t.success for g in dealt for t in g] == [True, False] * 20
    taught = make(rewards="none", teacher="there")
    lesson = taught.lesson([*group(0, 1.0, 0.0), *group(1, 1.0, 1.0)])
    assert [e.advantages for e in lesson.entries] == [[0.0, 0.0]] * 4
    alone = make(advantage="none", group_size=1)
    lesson = alone.lesson([*group(0, 0.75), *group(1, 0.0)])
    assert [e.advantages for e in lesson.entries] == [[0.75, 0.75], [0.0, 0.0]]
    assert pytest.approx(0.375) == sum(t.reward for t in lessons(lesson)) / 2


def lessons(lesson):
    return [entry.trajectory for entry in lesson.entries]
