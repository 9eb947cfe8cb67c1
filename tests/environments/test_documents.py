"""Questions: the last line holds, pages can be found, pages can be read."""

import re

import pytest

from kimi_jax.environments.episodes import expert_episode
from tests.environments import readers
from tests.environments.readers import FORM, made


def ask(environment, text: str) -> str:
    step = environment.step(FORM.close(text))
    return step.info["success"] if step.done else readers.texts(step.tokens)[0]


def pages(environment, task) -> list[str]:
    count = int(readers.texts(environment.reset(task))[1].split()[0])
    return [ask(environment, f"read {page}") for page in range(1, count + 1)]


def test_a_revision_replaces_what_was_told_before() -> None:
    environment, task = made("documents:difficulty=3:length=512")
    revised = 0
    for seed in range(30):
        task = task._replace(seed=seed)
        key, relation, trait = readers.texts(environment.reset(task))[1].split()[-3:]
        text = "\n".join(pages(environment, task))
        people = re.findall(rf"\b{key} {relation} (\w+)\.", text)
        answers = re.findall(rf"\b{people[-1]} {trait} (\w+)\.", text)
        assert len(people) + len(answers) == 3  # difficulty: the lines that matter
        if len(answers) > 1:
            revised += 1
            assert ask(environment, f"say {answers[0]}") is False
            pages(environment, task)
        assert ask(environment, f"say {answers[-1]}") is True
    assert 8 <= revised <= 22


def test_facts_are_spread_over_the_pages() -> None:
    environment, task = made("documents:difficulty=12:pages=5:distractors=20:length=1K")
    found = pages(environment, task)
    assert len(found) >= 6
    assert sum(bool(re.search(r"\d \w+ \w+\.", page)) for page in found) >= 5


def test_find_tells_pages_in_order_and_the_last_eight() -> None:
    environment, task = made("documents:difficulty=30:length=2K:distractors=0")
    found = pages(environment, task)
    key, relation, _ = readers.texts(environment.reset(task))[1].split()[-3:]
    fact = f"{key} {relation}"
    told = [int(page) for page in ask(environment, f"find {fact}").split()]
    assert told == [i for i, page in enumerate(found, 1) if f"{fact} " in page][-8:]
    assert len(told) == 8
    assert ask(environment, "find zebra") == "none"


def test_pages_that_do_not_exist() -> None:
    environment, task = made("documents:length=512")
    environment.reset(task)
    for page in ("0", "5", "-1", "x", "1 2"):
        assert ask(environment, f"read {page}") == "error: pages are 1 to 4"


def test_process_rewards_for_pages_that_hold_the_last_line() -> None:
    environment, task = made("documents:difficulty=4:process=1:length=512")
    episode = expert_episode(environment, task)
    reads = [FORM.text_of(turn).startswith("read") for turn in episode.turns]
    paid = [reward > 0 for reward in episode.rewards[:-1]]
    assert paid == reads[:-1] and sum(episode.rewards[:-1]) == pytest.approx(1.0)


def test_the_document_in_the_prompt() -> None:
    environment, task = made("documents:mode=prompt:difficulty=4:length=2K")
    prompt = environment.reset(task)
    assert len(prompt) > 1900
    assert ask(environment, "find k7") == "error: say ANSWER"
    episode = expert_episode(environment, task)
    assert len(episode.spans) == 1 and episode.success
