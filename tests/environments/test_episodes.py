"""The guard, rewards and environments of one's own, specs and seeds."""

import json

import pytest

from kimi_jax.environments import specs
from kimi_jax.environments.environment import Task, seed_of
from kimi_jax.environments.episodes import expert_episode, guard, replay
from kimi_jax.environments.rewards import Rewarded
from kimi_jax.environments.tools import Tools
from kimi_jax.errors import UserError
from tests.environments import faulty
from tests.environments.readers import FORM, made

TASK = Task("x", 1, 100, 0)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "step: ZeroDivisionError: oh"),
        ("none given", "step: TypeError"),
        ("nan", "step: ValueError: reward nan"),
        ("infinite", "step: ValueError: reward inf"),
        ("no number", "step: ValueError"),
        ("outside", "token 272 is outside 0..271"),
        ("negative", "token -1 is outside 0..271"),
        ("text", "step: TypeError: tokens of type"),
        ("fractions", "step: TypeError: tokens of type float"),
        ("silence", "no tokens, and the episode is not over"),
        ("flood", "1001 tokens, more than 1000"),
        ("no info", "step: TypeError"),
        ("reset", "reset: KeyError: 'nothing there'"),
        ("empty", "reset gave no tokens"),
    ],
)
def test_faults_end_the_episode_and_nothing_else(fault: str, said: str) -> None:
    environment = guard(faulty.Faulty(FORM, fault), vocab_size=272, max_tokens=1000)
    prompt = environment.reset(TASK)
    assert prompt == ([0] if fault in ("reset", "empty") else FORM.open("assistant"))
    for _ in range(2):  # and stays over
        step = environment.step([65, FORM.end])
        assert (step.tokens, step.reward, step.done) == ([], 0.0, True)
        assert said in step.info["error"] and step.info["success"] is False
    # The next task has another chance.
    environment.environment.fault = "none"
    environment.reset(TASK)
    assert not environment.step([65]).done
    assert environment.step([65]).info == {"success": True}


def test_environments_that_never_end_are_ended() -> None:
    environment = guard(faulty.Faulty(FORM, turns=10**9), max_turns=5)
    environment.reset(TASK)
    steps = [environment.step([65]) for _ in range(5)]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert steps[-1].info == {"error": "no end after 5 turns", "success": False}


def test_the_guard_changes_nothing_that_is_right() -> None:
    environment, task = made("tools:difficulty=2:process=1")
    plain = expert_episode(environment, task)
    guarded = expert_episode(guard(specs.make_of(task, FORM), vocab_size=272), task)
    assert guarded.tokens == plain.tokens and guarded.rewards == plain.rewards


def test_a_task_that_cannot_be_is_a_failed_episode_behind_the_guard() -> None:
    environment = guard(Tools(FORM))
    environment.reset(Task("tools", 9, 16, 0))
    assert "raise length" in environment.step([65]).info["error"]


def test_a_reward_of_ones_own() -> None:
    text = "tools:difficulty=2:process=1"
    environment, task = made(text)
    plain = expert_episode(environment, task)
    rewarded = Rewarded(environment, faulty.half)
    episode = expert_episode(rewarded, task)
    wanted = [
        0.5 * reward - 0.01 * turn for turn, reward in enumerate(plain.rewards, start=1)
    ]
    assert episode.rewards == wanted and episode.tokens == plain.tokens
    assert expert_episode(rewarded, task).rewards == wanted  # starts anew
    named, named_task = made(f"{text}:reward=tests.environments.faulty.half")
    assert expert_episode(named, named_task).rewards == wanted
    again = specs.make_of(named_task, FORM)
    assert [step.reward for step in replay(again, task, plain.turns)] == wanted
    assert not expert_episode(rewarded, task, skill=0.0).success


def test_a_reward_that_is_no_number_is_a_fault() -> None:
    environment, task = made("tools:reward=tests.environments.faulty.wrong")
    spoiled = guard(environment)
    spoiled.reset(task)
    assert "reward nan" in spoiled.step(environment.expert()).info["error"]


def test_an_environment_of_ones_own_by_name() -> None:
    text = "tests.environments.faulty:Faulty:turns=3/4:difficulty=2"
    three, four = specs.parse(text)
    assert str(three) == "tests.environments.faulty:Faulty:turns=3:difficulty=2"
    task = specs.task_of(four, 7)
    assert task == ("tests.environments.faulty:Faulty:turns=4", 2, 1024, 7)
    assert len(expert_episode(specs.make(four, FORM), task).spans) == 4
    assert len(expert_episode(specs.make_of(task, FORM), task).spans) == 4
    with pytest.raises(UserError, match="Faulty has no method mistake"):
        expert_episode(specs.make(four, FORM), task, skill=0.5)
    with pytest.raises(UserError, match="Faulty has no method mistake"):
        inner = Rewarded(specs.make(four, FORM), faulty.half)
        expert_episode(inner, task, noise=0.5)


def test_specs_and_tasks() -> None:
    found = specs.parse_list(["tools:difficulty=1/2:length=1K/64K", "code:kind=repair"])
    assert [str(spec) for spec in found] == [
        "tools:difficulty=1:length=1024",
        "tools:difficulty=1:length=65536",
        "tools:difficulty=2:length=1024",
        "tools:difficulty=2:length=65536",
        "code:kind=repair",
    ]
    task = specs.task_of(found[3], 5)
    assert task == Task("tools", 2, 65536, 5)
    assert Task(*json.loads(json.dumps(task))) == task
    assert specs.task_of(found[4], 0) == Task("code:kind=repair", 1, 1024, 0)
    assert set(specs.dials(Tools)) == {"process", "max_turns", "distractors", "fails"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tool", "did you mean 'tools'"),
        ("chess", "there are tools, documents, code, or name a class"),
        ("tools:difficult=1", "environment .*did you mean 'difficulty'"),
        ("tools:difficulty=x", "difficulty='x' is not a whole number"),
        ("no.such:Class", "cannot be imported"),
        ("tests.environments.faulty:Nothing", "cannot be imported"),
        ("tests.environments.faulty:NoDefaults", "size has no default"),
        ("tools:reward=tests.environments.faulty.none", "reward=.*cannot be imported"),
        ("tools:reward=x", "reward=x: cannot be imported"),
    ],
)
def test_specs_that_are_wrong(text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        specs.make(specs.parse(text)[0], FORM)


def test_specs_named_twice() -> None:
    with pytest.raises(UserError, match="'tools' is named twice"):
        specs.parse_list(["tools", "code", "tools"])


@pytest.mark.parametrize("name", ["noise", "skill"])
def test_shares_are_from_0_to_1(name: str) -> None:
    environment, task = made("tools")
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match=f"{name}={value}"):
            expert_episode(environment, task, **{name: value})


def test_streams_of_seeds_are_apart() -> None:
    seeds = [
        seed_of(stream, seed, index)
        for stream in ("training", "validation", "evaluation")
        for seed in (0, 1)
        for index in range(50)
    ]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert seed_of("training", 0, 3, 1) != seed_of("training", 0, 3, 2)
