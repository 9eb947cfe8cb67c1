"""Groups that are put together, kept, drawn again, and dropped when stale."""

import json

import pytest

from kimi_jax.environments.environment import Task
from kimi_jax.errors import UserError
from kimi_jax.rl.buffer import Buffer, Gather
from kimi_jax.rl.trajectory import Trajectory, Turn

TASK = Task("tools", 1, 64, 5)


def group(number, version, rewards=(0.0, 1.0)):
    """Members that began at `version` and ended one later."""
    return [
        Trajectory(
            TASK,
            number,
            member,
            [1, 2, 3, 4],
            [Turn(2, 4, reward, {"success": reward > 0})],
            [-0.1 / 3, -0.7],
            [version, version + 1],
            None,
            "done",
        )
        for member, reward in enumerate(rewards)
    ]


def numbers(groups):
    return [members[0].group for members in groups]


def test_groups_are_complete_when_their_last_member_is():
    first, second = group(0, 0), group(1, 0)
    gather = Gather(2)
    assert gather.add([first[1], second[0]]) == []
    again = Gather(2)
    again.restore(json.loads(json.dumps(gather.state())))
    assert again.add([first[0]]) == [first]
    assert gather.add([second[1], first[0]]) == [second, first]
    assert gather.state() == [] and len(again.state()) == 1


def test_groups_are_kept_until_they_are_stale():
    buffer = Buffer(capacity=4, max_staleness=2, seed=0)
    assert not buffer.add(group(0, 0, (0.5, 0.5)))
    for number in range(1, 7):
        assert buffer.add(group(number, number))
    assert numbers(buffer.groups) == [3, 4, 5, 6]
    # Half of a batch beside two new groups are two old ones.
    drawn = numbers(buffer.draw(0.5, fresh=2, version=6))
    assert len(set(drawn)) == 2 and set(drawn) <= {4, 5, 6}
    assert numbers(buffer.groups) == [4, 5, 6]
    assert numbers(buffer.draw(0.9, fresh=2, version=7)) == [5, 6]
    assert buffer.draw(0.0, fresh=2, version=7) == []
    assert buffer.draw(0.5, fresh=2, version=9) == []


def test_state_is_exact():
    buffer = Buffer(8, 9, seed=1)
    for number in range(8):
        buffer.add(group(number, number))
    buffer.draw(0.5, fresh=4, version=8)
    again = Buffer(8, 9, seed=1)
    again.restore(json.loads(json.dumps(buffer.state())))
    assert again.groups == buffer.groups
    draws = [
        [numbers(one.draw(0.4, fresh=4, version=8)) for _ in range(6)]
        for one in (buffer, again)
    ]
    assert draws[0] == draws[1] and len(set(map(tuple, draws[0]))) > 1


def test_unfit_values_are_refused():
    with pytest.raises(UserError, match="capacity=-1"):
        Buffer(-1, 0, 0)
    with pytest.raises(UserError, match=r"share=1\.0"):
        Buffer(1, 0, 0).draw(1.0, fresh=1, version=0)
