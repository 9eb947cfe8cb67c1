"""Trajectories are the same however they are batched, carried over or restored."""

import dataclasses
import itertools
import json

import chex
import jax
import numpy as np
import pytest

from kimi_jax import sharding
from kimi_jax.errors import UserError
from kimi_jax.infer.pages import CacheFull
from kimi_jax.infer.sampling import Sampling
from kimi_jax.rl import storage
from kimi_jax.rl.rollout import Limits, Rollouts
from kimi_jax.rl.trajectory import from_json
from tests import tiny
from tests.rl import worlds

LIMITS = Limits(turn_tokens=6, max_turns=4, max_tokens=64)
# Groups of different lengths, one of them with more turns than are allowed.
TASKS = worlds.tasks((1, 5), (3, 21), (9, 2))
STOP = ((worlds.END,), (100,), (101,))


def rollouts(slots, limits=LIMITS, **settings):
    clock = settings.pop("clock", itertools.count().__next__)
    generator = worlds.generator(slots, **settings)
    return Rollouts(
        generator, worlds.make, limits, Sampling(), STOP, seed=5, clock=clock
    )


def by_name(trajectories):
    return {(t.group, t.member): t for t in trajectories}


def assert_equal(one, other, *, exact):
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        plain = {"logprobs": [], "routes": None}
        assert dataclasses.replace(a, **plain) == dataclasses.replace(b, **plain)
        np.testing.assert_array_equal(a.routes, b.routes)
        # Rounding of float32, which a batch of another size changes.
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=0 if exact else 1e-5)


@pytest.fixture(scope="module")
def played():
    """All groups at once; (trajectories, statistics)."""
    made = rollouts(8)
    done = by_name(made.run(TASKS, group_size=3, version=2))
    assert made.generator.pager.in_use() == 0 and not made.unfinished
    return done, made.statistics


def written(t):
    """Tokens of the policy."""
    return sum(turn.stop - turn.start for turn in t.turns)


def test_trajectories_are_whole(played):
    done, statistics = played
    assert set(done) == set(itertools.product(range(3), range(3)))
    for (group, _), t in done.items():
        turns, prompt = TASKS[group][1:3]
        assert len(t.turns) == min(turns, 4)
        assert t.finished == ("turns" if turns > 4 else "done")
        assert len(t.logprobs) == len(t.versions) == written(t)
        assert set(t.versions) == {2} and max(t.logprobs) < 0
        assert t.routes.shape == (len(t.tokens) - 1, 1, 2)
        world = worlds.Echo()
        assert t.tokens[:prompt] == world.reset(TASKS[group])
        for turn, after in itertools.pairwise([*t.turns, None]):
            assert turn.stop - turn.start <= 6
            cut = turn.info.get("cut", False)
            assert cut == (t.tokens[turn.stop - 1] not in (7, 100, 101))
            step = world.step(t.tokens[turn.start : turn.stop])
            assert turn.reward == step.reward
            if after:
                assert t.tokens[turn.stop : after.start] == step.tokens
        assert t.success == bool(t.turns[-1].info.get("success"))
    assert len({tuple(t.tokens) for t in done.values()}) == 9
    assert statistics.finished == {"done": 6, "turns": 3}
    assert statistics.drawn == sum(len(t.logprobs) for t in done.values())
    given = sum(len(t.tokens) - len(t.logprobs) for t in done.values())
    assert statistics.given == given - 2 * sum(task.length for task in TASKS)
    assert 1 < statistics.live_mean <= 8 and statistics.environment_seconds > 0


def test_two_slots_play_as_eight_do(played):
    few = rollouts(2)
    done = by_name(few.run(TASKS, group_size=3, version=2))
    assert_equal(done, played[0], exact=False)
    assert few.generator.pager.in_use() == 0 and few.statistics.live_mean <= 2


@pytest.mark.slow
def test_a_mesh_keeps_each_group_in_one_part_of_the_rows(played):
    cfg = worlds.config("mesh.data=2", "mesh.tensor=2")
    mesh = sharding.make_mesh(cfg, jax.devices()[:4])
    variables = tiny.variables(cfg.model)
    places = sharding.state_shardings(mesh, variables)
    made = rollouts(4, mesh=mesh, variables=jax.device_put(variables, places))
    done, parts, tasks = {}, {}, TASKS
    while tasks or made.unfinished or made.waiting:
        done |= by_name(made.run(tasks, group_size=3, version=2, max_calls=1))
        for member in made._members:
            part = made.generator.pager.shard(member.sequence.slot)
            parts.setdefault(member.trajectory.group, set()).add(part)
        tasks = []
    assert sorted(map(len, parts.values())) == [1, 1, 1]
    assert set.union(*parts.values()) == {0, 1}
    assert_equal(done, played[0], exact=False)
    assert made.generator.pager.in_use() == 0


def test_a_trajectory_is_json_and_back(played):
    for t in played[0].values():
        again = from_json(json.loads(json.dumps(t.to_json())))
        np.testing.assert_array_equal(again.routes, t.routes)
        assert again.routes.dtype == np.int32
        routes = {"routes": None}
        assert dataclasses.replace(again, **routes) == dataclasses.replace(t, **routes)
        assert again.reward == t.reward
    with pytest.raises(UserError, match="not a trajectory"):
        from_json({"tokens": []})


def test_partial_rollouts_go_on_and_a_restored_run_equals_them(played):
    """In runs of three calls; then from the bytes of every pause, to the bit."""
    made, done, pages, kept = rollouts(2), {}, {}, {}
    tasks, version = TASKS, 0
    while tasks or made.unfinished or made.waiting:
        done |= by_name(made.run(tasks, group_size=3, version=version, max_calls=3))
        tasks, version = [], version + 1
        kept[version] = storage.to_bytes(made.state())
        pages[version] = made.generator.pager.in_use()
    for name, t in done.items():
        assert sorted(t.versions) == t.versions
        assert t.tokens == played[0][name].tokens
    assert any(len(set(t.versions)) > 1 for t in done.values())
    for pause in (1, 2, version // 2):
        again = rollouts(2)
        again.restore(storage.from_bytes(kept[pause]))
        assert again.generator.pager.in_use() == pages[pause]  # shared as before
        part = {}
        for number in range(pause, version):
            part |= by_name(again.run([], group_size=1, version=number, max_calls=3))
        assert len(part) > 2 and again.generator.pager.in_use() == 0
        assert_equal(part, {name: done[name] for name in part}, exact=True)


def test_states_of_old_weights_are_kept(played):
    made = rollouts(8)
    first = made.run(TASKS, group_size=3, version=0, max_calls=5)
    before = by_name(made.unfinished)
    assert before and all(t.turns[-1].info == {"open": True} for t in before.values())
    made.generator.variables = tiny.variables(made.generator.model, 1)
    after = by_name([*first, *made.run([], group_size=3, version=1)])
    changed = 0
    for name, t in before.items():
        drawn = len(t.logprobs)
        assert after[name].tokens[: len(t.tokens)] == t.tokens
        assert after[name].logprobs[:drawn] == t.logprobs
        assert after[name].versions[:drawn] == [0] * drawn
        assert set(after[name].versions[drawn:]) <= {1}
        changed += after[name].tokens != played[0][name].tokens
    assert changed > 2


@pytest.mark.parametrize(
    ("limits", "finished", "turns"),
    [
        ({"max_tokens": 21}, "tokens", 0),  # the prompt is as long
        ({"max_tokens": 24}, "tokens", 1),  # amid a turn
        ({"max_tokens": 31}, "tokens", 1),  # an answer of five has no room
        ({"seconds": 10}, "time", 0),
    ],
)
def test_limits_are_recorded(limits, finished, turns):
    made = rollouts(8, dataclasses.replace(LIMITS, **limits))
    (t,) = made.run(TASKS[1:2], group_size=1, version=0)
    assert t.finished == finished and not t.success
    assert len(t.turns) >= turns and len(t.tokens) <= made.limits.max_tokens
    assert len(t.logprobs) == written(t)
    assert turns == 0 or len(t.routes) == len(t.tokens) - 1
    assert made.generator.pager.in_use() == 0
    assert made.statistics.finished == {finished: 1}


def test_broken_environments_end_their_trajectories_alone():
    words = ["no such world", "token 400", "the world ends", "token 9999"]
    words += ["reward nan", "no tokens", "TypeError", "no such task"]
    broken = worlds.tasks(*((how, 5) for how in range(8)), environment="broken")
    made = rollouts(8)
    done = made.run([*broken, TASKS[0]], group_size=2, version=0)
    assert made.statistics.finished == {"error": 16, "done": 2}
    for t in done:
        if t.group == 8:
            continue
        assert t.reward == 0 and not t.success and len(t.turns) == 1
        assert len(t.logprobs) == written(t)
        assert words[t.group] in t.turns[0].info["error"]
    assert made.generator.pager.in_use() == 0


def test_an_environment_that_answers_otherwise_ends_with_error():
    made = rollouts(8)
    made.run(TASKS[1:2], group_size=2, version=0, max_calls=4)
    (before, *_) = made.unfinished
    state = made.state()
    assert len(before.turns) > 1
    again = rollouts(8)
    worlds_made = itertools.count()

    def make(task):
        world = worlds.Echo()
        if next(worlds_made) == 0:
            world.expert, step = None, world.step
            world.step = lambda tokens: step(tokens)._replace(tokens=[9])
        return world

    again._make_environment = make
    again.restore(state)
    done = again.run([], group_size=2, version=1)
    assert sorted(t.finished for t in done) == ["done", "error"]
    (wrong,) = (t for t in done if t.finished == "error")
    assert wrong.tokens == before.tokens[: len(wrong.tokens)]
    assert wrong.logprobs == before.logprobs
    assert len(wrong.logprobs) == written(wrong)
    assert len(wrong.routes) == len(wrong.tokens) - 1
    assert "not the same" in wrong.turns[-1].info["error"]


def test_misfits_are_refused():
    made = rollouts(8)
    made.run(TASKS, group_size=3, version=0, max_calls=2)
    with pytest.raises(UserError, match="these rollouts have begun"):
        made.restore(made.state())
    with pytest.raises(UserError, match=r"'slots': 8.*'slots': 2"):
        rollouts(2).restore(made.state())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"turn_tokens": 0}, "turn_tokens=0: must be at least 1"),
        ({"max_tokens": 1}, "max_tokens=1: must be at least 2"),
        ({"max_calls": 0}, "max_calls=0: must be at least 1, or None"),
        ({"seconds": -1.0}, "seconds=-1.0: must be above 0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"max_tokens": 97}, "max_tokens=97, but the generator has length=96"),
    ],
)
def test_unfit_limits_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        rollouts(8, Limits(**{**dataclasses.asdict(LIMITS), **setting}))


def test_what_has_no_room_is_refused_and_does_not_hang():
    with pytest.raises(UserError, match="group_size=2 with 1 slot"):
        rollouts(1).run(TASKS, group_size=2, version=0)
    with pytest.raises(UserError, match="group_size=0"):
        rollouts(1).run(TASKS, group_size=0, version=0)
    made = rollouts(8)
    for _ in range(7):
        made.generator.open([1], room=95)
    with pytest.raises(CacheFull, match="no room for a trajectory of max_tokens=64"):
        made.run(TASKS, group_size=2, version=0)


def test_forking_a_group_copies_the_states_of_kda_alone():
    """34 tokens are read: 8 pages and a part; of this each has a copy once it grows."""
    made = worlds.generator(8)
    root = made.open(worlds.tokens(35))
    made.read([root])
    before, held = jax.device_get(made.cache), made.pager.in_use()
    forks = made.fork(root, 7)
    after = jax.device_get(made.cache)
    assert held == 9 and made.pager.in_use() == 9

    def changed(old, new):
        """Rows or pages, along the third axis, that are not as they were."""
        differs = np.moveaxis(old != new, 2, 0).reshape(old.shape[2], -1)
        return np.flatnonzero(differs.any(axis=1)).tolist()

    copied, chosen = 0, [fork.slot for fork in forks]
    old_states, new_states = map(jax.tree.leaves, (before.states, after.states))
    for x, y in zip(old_states, new_states, strict=True):
        assert changed(x, y) == chosen
        copied += y[:, :, chosen].nbytes
    # One layer, 2 heads: a state of 8 x 8 and the last 3 of q, k, v, in float32.
    assert copied == 7 * 2 * (8 * 8 + 3 * 3 * 8) * 4
    chex.assert_trees_all_equal(before.pages, after.pages)
    for fork in forks:
        made.reserve(fork, 36)
    grown = jax.device_get(made.cache)
    assert made.pager.in_use() == 9 + 7
    ninth = sorted(made.pager.where(fork.slot, 8) for fork in forks)
    old_pages, new_pages = map(jax.tree.leaves, (before.pages, grown.pages))
    for x, y in zip(old_pages, new_pages, strict=True):
        assert changed(x, y) == ninth
