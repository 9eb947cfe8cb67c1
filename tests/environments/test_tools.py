"""Look-ups: distractors mislead, tools fail once, process rewards, filler."""

import collections
import itertools
import re

import pytest

from kimi_jax.environments.episodes import expert_episode, play
from tests.environments import readers
from tests.environments.readers import FORM, made


def ask(environment, text: str):
    step = environment.step(FORM.close(text))
    return step, (readers.texts(step.tokens) or [""])[0]


def key_of(told: str) -> str:
    return re.search(r"=(\w+)", told)[1]


def plan(environment, task):
    """Live tool, old tools, key and fields."""
    system, user = readers.texts(environment.reset(task))
    live, old = re.search(r"\blive (\w+)(?:, old ([\w ]+))?\.", system).groups()
    key, *fields = user.split()
    return live, old.split(), key, fields


def test_old_tools_answer_readily_and_wrong() -> None:
    environment, task = made("tools:difficulty=2:distractors=3:fails=0:process=1")
    task = task._replace(length=128)
    for seed in range(20):
        live, old, key, fields = plan(environment, task._replace(seed=seed))
        right = ask(environment, f"{live} {key} {fields[0]}")[1]
        for tool in old:
            step, told = ask(environment, f"{tool} {key} {fields[0]}")
            assert step.reward == 0.0
            assert key_of(told) != key_of(right)
            again = ask(environment, f"{tool} {key} {fields[0]}")[1]
            assert key_of(again) == key_of(told)


@pytest.mark.parametrize("distractors", [1, 4])
def test_who_believes_old_tools_never_succeeds(distractors: int) -> None:
    environment, task = made(f"tools:difficulty=3:distractors={distractors}:fails=0")
    for seed in range(50):
        _, old, key, fields = plan(environment, task._replace(seed=seed, length=160))
        for field in fields:
            told = ask(environment, f"{old[-1]} {key} {field}")[1]
            key = key_of(told)
        step, _ = ask(environment, f"say {key}")
        assert step.done and step.reward == 0.0 and not step.info["success"]


def test_who_does_not_read_never_succeeds() -> None:
    environment, task = made("tools:difficulty=1:length=96")
    counted = collections.Counter()
    for seed in range(50):
        *_, key, _ = plan(environment, task._replace(seed=seed))
        counted[ask(environment, f"say {key}")[0].reward] += 1
        answer = expert_episode(environment, task._replace(seed=seed)).turns[-1]
        counted[FORM.text_of(answer)] += 1
    assert counted.pop(0.0) == 50
    assert max(counted.values()) <= 3  # no answer is worth guessing


def test_the_live_tool_fails_once_at_a_place_and_must_be_asked_again() -> None:
    environment, task = made("tools:difficulty=4:fails=1:length=256:process=1")
    live, _, key, fields = plan(environment, task)
    for number, field in enumerate(fields):
        call = f"{live} {key} {field}"
        step, told = ask(environment, call)
        if number < 2:  # at most half of the places fail
            assert told == "busy" and step.reward == 0.0
            step, told = ask(environment, call)
        assert step.reward == pytest.approx(0.25)
        key = key_of(told)
        assert ask(environment, call)[0].reward == 0.0  # paid once
    step, _ = ask(environment, f"say {key}")
    assert step.done and step.reward == 1.0 and step.info["success"]


def test_other_fields_lead_astray_and_the_expert_comes_back() -> None:
    environment, task = made("tools:difficulty=2:fails=0:length=128")
    live, _, key, fields = plan(environment, task)
    other = next(f for f in "abc" if f not in fields)
    told = ask(environment, f"{live} {key} {other}")[1]
    assert key_of(told)
    for wrong, said in [("99", "no such key"), (key, "no such field")]:
        assert ask(environment, f"{live} {wrong} ?")[1] == f"error: {said}"
    assert FORM.text_of(environment.expert()) == f"{live} {key} {fields[0]}"


def test_without_process_rewards_only_the_end_counts() -> None:
    environment, task = made("tools:difficulty=3:length=128")
    *rest, last = expert_episode(environment, task).rewards
    assert not any(rest) and last == 1.0


def test_tools_differ_from_task_to_task() -> None:
    environment, task = made("tools:length=96")
    live = {plan(environment, task._replace(seed=seed))[0] for seed in range(40)}
    assert len(live) >= 8


def test_filler_hides_keys_that_are_no_answer() -> None:
    environment, task = made("tools:difficulty=2:length=2K:fails=0")
    episode = expert_episode(environment, task)
    assert FORM.text_of(episode.tokens).count("It was ") == 3
    told = [
        FORM.show(episode.tokens[a:b])
        for (_, a), (b, _) in itertools.pairwise(episode.spans)
    ]
    assert all(len(text) > 500 and text.count("=") == 1 for text in told)
    short = play(environment, task._replace(length=96), [])
    assert "It was" not in FORM.text_of(short.tokens)
