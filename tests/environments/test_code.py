"""Code changes: what tests say, what edits do, what counts as solved."""

import re

import pytest

from kimi_jax.environments.episodes import expert_episode
from tests.environments import readers
from tests.environments.readers import FORM, made


def ask(environment, text: str) -> str:
    step = environment.step(FORM.close(text))
    return step.info["success"] if step.done else readers.texts(step.tokens)[0]


def test_every_line_to_change_must_be_changed() -> None:
    environment, task = made("code:difficulty=4:length=1K:process=1")
    turns = [FORM.text_of(turn) for turn in expert_episode(environment, task).turns]
    edits = [turn for turn in turns if turn.startswith("edit")]
    assert len(edits) == 4 and len({edit.split()[1] for edit in edits}) == 4
    for left_out in edits:
        environment.reset(task)
        for edit in edits:
            assert edit == left_out or ask(environment, edit) == "ok"
        assert ask(environment, "run") != "pass"
        assert ask(environment, "submit") is False
    environment.reset(task)
    for edit in edits:
        step = environment.step(FORM.close(edit))
        assert step.reward == pytest.approx(0.25)
    assert ask(environment, "run") == "pass" and ask(environment, "submit") is True


def test_undone_work_costs_its_process_reward() -> None:
    environment, task = made("code:process=1:length=384")
    environment.reset(task)
    edit = next(
        turn
        for turn in (FORM.text_of(t) for t in expert_episode(environment, task).turns)
        if turn.startswith("edit")
    )
    environment.reset(task)
    spoiled = edit + " + 1"
    rewards = [environment.step(FORM.close(x)).reward for x in (edit, spoiled, edit)]
    assert rewards == [1.0, -1.0, 1.0]


def test_hidden_tests_see_what_the_shown_one_does_not() -> None:
    environment, task = made("code:kind=repair:length=512:distractors=0")
    for seed in range(10):
        task = task._replace(seed=seed)
        environment.reset(task)
        said = ask(environment, "run")
        root, wanted = re.fullmatch(r"(\w+) \d+ is -?\d+ not (-?\d+)", said).groups()
        for file in ask(environment, "list").split():
            lines = ask(environment, f"read {file}").split("\n")
            if any(f"fn {root} x" in line for line in lines):
                number = next(line.split()[0] for line in lines if " ret " in line)
                value = wanted if int(wanted) >= 0 else f"0 - {wanted[1:]}"
                assert ask(environment, f"edit {file} {number} ret {value}") == "ok"
        assert ask(environment, "run") == "pass"
        assert ask(environment, "submit") is False


def test_the_expert_mends_what_was_spoiled() -> None:
    environment, task = made("code:difficulty=2:length=512")
    environment.max_turns = 100
    for kind in ("rename", "repair"):
        environment.kind = kind
        environment.reset(task)
        for file in ask(environment, "list").split():
            count = len(ask(environment, f"read {file}").split("\n"))
            for number in range(1, count + 1):
                ask(environment, f"edit {file} {number} while 1")
        while not (step := environment.step(environment.expert())).done:
            pass
        assert step.info["success"]


def test_edits_and_what_is_wrong_with_them() -> None:
    environment, task = made("code:length=384")
    environment.reset(task)
    file = ask(environment, "list").split()[0]
    lines = ask(environment, f"read {file}").split("\n")
    assert [line.split()[0] for line in lines] == [
        str(i) for i in range(1, len(lines) + 1)
    ]
    wrong_line = f"error: lines are 1 to {len(lines)}"
    for number in ("0", "99", "-1", "x", "1e9"):
        assert ask(environment, f"edit {file} {number} end") == wrong_line
    assert ask(environment, "read test") == "error: no such file"
    assert ask(environment, f"edit {file} 1 {'x' * 201}").startswith("error: one line")
    assert ask(environment, f"edit {file} 1") == "ok"  # empties the line
    assert ask(environment, f"read {file}").split("\n")[0] == "1 "


def test_programs_that_loop_or_dig_are_told_so() -> None:
    environment, task = made("code:length=384:distractors=0")
    environment.reset(task)
    for file in ask(environment, "list").split():
        lines = ask(environment, f"read {file}").split("\n")
        number, name = next(
            (line.split()[0], line.split()[2]) for line in lines if " fn " in line
        )
        ask(environment, f"edit {file} {int(number) + 1} ret {name}(x) + {name}(x)")
    assert ask(environment, "run").endswith("too deep")
    assert ask(environment, "submit") is False
