"""What holds of every family: determinism, experts, rewards, lengths, bad turns."""

import hashlib

import numpy as np
import pytest

from kimi_jax.environments import specs
from kimi_jax.environments.episodes import expert_episode, play, replay
from kimi_jax.errors import UserError
from tests.environments import readers
from tests.environments.readers import FORM, made

FAMILIES = {
    "tools": "tools:difficulty=2:length=192:process=1",
    "documents": "documents:difficulty=3:length=384:process=1",
    "rename": "code:difficulty=2:length=384:process=1",
    "repair": "code:kind=repair:difficulty=2:length=512:process=1",
}
# Of the expert's episodes of 4 tasks each. A change of one means that success measured
# before does not compare with what is measured after.
DIGESTS = {
    "tools": "415262d44475d746",
    "documents": "09bf40acd3b675c2",
    "rename": "fa27acff05464774",
    "repair": "87f11a72dec798ea",
}
every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_the_expert_solves_every_task_within_its_length(name: str) -> None:
    environment, task = made(FAMILIES[name])
    for seed in range(50):
        episode = expert_episode(environment, task._replace(seed=seed))
        assert episode.success
        assert sum(episode.rewards) == pytest.approx(2.0)  # final 1, process 1
        assert 0.7 * task.length <= len(episode.tokens) <= task.length


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tools", "tools:difficulty=1/8/30:length=2K"),
        ("tools", "tools:difficulty=3:distractors=0/4:fails=1:length=8K"),
        ("documents", "documents:difficulty=1/2/4/12:length=2K"),
        ("documents", "documents:difficulty=1/4:mode=prompt:pages=7:length=4K"),
        ("rename", "code:difficulty=1/5:length=4K:distractors=0/3"),
        ("repair", "code:kind=repair:difficulty=1/5:length=4K"),
    ],
)
def test_what_is_shown_is_enough(name: str, text: str) -> None:
    for spec in specs.parse(text):
        environment = specs.make(spec, FORM)
        for seed in range(3):
            task = specs.task_of(spec, seed)
            episode = expert_episode(environment, task)
            assert episode.success
            assert 0.9 * task.length <= len(episode.tokens) <= task.length
            solved, turns = readers.solve(name, environment, task)
            assert solved, task
            assert turns <= len(episode.spans) + 2


@pytest.mark.parametrize(
    "text",
    [
        "tools:difficulty=8:length=1M",
        "documents:difficulty=4:length=256K",
        "documents:mode=prompt:length=256K",
        "code:difficulty=3:length=256K",
    ],
)
def test_long_episodes(text: str) -> None:
    environment, task = made(text)
    episode = expert_episode(environment, task)
    assert episode.success
    assert 0.9 * task.length <= len(episode.tokens) <= task.length


@every_family
def test_turns_of_another_task_never_solve_this_one(name: str) -> None:
    environment, task = made(FAMILIES[name])
    other = expert_episode(environment, task._replace(seed=99)).turns
    for seed in range(20):
        assert not play(environment, task._replace(seed=seed), other).success


@every_family
def test_episodes_are_deterministic_and_replayed(name: str) -> None:
    environment, task = made(FAMILIES[name], seed=5)
    first = expert_episode(environment, task, noise=0.3)
    fresh = specs.make_of(task, FORM)
    again = expert_episode(fresh, task, noise=0.3)
    assert again.tokens == first.tokens and again.rewards == first.rewards
    *most, last = replay(specs.make_of(task, FORM), task, first.turns)
    assert [step.reward for step in (*most, last)] == first.rewards
    assert last.done and last.info["success"] and last.tokens == []
    shown = [token for step in most for token in step.tokens]
    environment.reset(task)
    prompt = first.tokens[: first.spans[0][0]]
    rest = np.array(first.tokens)[~first.policy_mask].tolist()
    assert prompt + shown == rest
    # The replay of a part goes on as the whole did.
    partial = specs.make_of(task, FORM)
    replay(partial, task, first.turns[:2])
    assert [partial.step(turn) for turn in first.turns[2:]] == [*most[2:], last]
    assert expert_episode(fresh, task._replace(seed=6)).tokens != first.tokens


@every_family
def test_instances_have_not_changed(name: str) -> None:
    environment, task = made(FAMILIES[name])
    found = hashlib.sha256()
    for seed in range(4):
        tokens = expert_episode(environment, task._replace(seed=seed)).tokens
        found.update(np.array(tokens, "<i4").tobytes())
    assert found.hexdigest()[:16] == DIGESTS[name]


@every_family
def test_the_mask_is_what_the_policy_wrote(name: str) -> None:
    environment, task = made(FAMILIES[name], seed=1)
    episode = expert_episode(environment, task, noise=0.3)
    assert (FORM.policy_mask(episode.tokens) == episode.policy_mask).all()
    written = np.array(episode.tokens)[episode.policy_mask].tolist()
    assert written == [token for turn in episode.turns for token in turn]
    assert all(turn[-1] == FORM.end for turn in episode.turns)


@every_family
def test_imperfect_experts(name: str) -> None:
    environment, task = made(FAMILIES[name])
    tasks = [task._replace(seed=seed) for seed in range(60)]
    never = [expert_episode(environment, t, skill=0.0) for t in tasks[:20]]
    assert not any(episode.success for episode in never)
    assert len({len(episode.spans) for episode in never}) > 1
    some = [expert_episode(environment, t, skill=0.3) for t in tasks]
    assert 0.2 <= np.mean([episode.success for episode in some]) <= 0.45
    noisy = [expert_episode(environment, t, noise=0.2) for t in tasks[:20]]
    plain = [expert_episode(environment, t) for t in tasks[:20]]
    assert all(episode.success for episode in noisy)
    assert sum(map(turns_of, noisy)) > sum(map(turns_of, plain))


def turns_of(episode) -> int:
    return len(episode.spans)


BAD_TURNS = {
    "no end": FORM.encode("say x"),
    "nothing": [],
    "end alone": [FORM.end],
    "garbage": [255, 0, 200, FORM.end],
    "role": [FORM.roles["tool"], *FORM.encode("=k7"), FORM.end],
    "outside": [10**9, FORM.end],
    "negative": [-1, FORM.end],
    "no number": ["x", FORM.end],
    "unknown": FORM.close("dance now please"),
    "say nothing": FORM.close("say"),
    "huge number": FORM.close("read " + "9" * 10_000),
    "huge line": FORM.close("edit a " + "9" * 10_000 + " x"),
    "unicode digit": FORM.close("read ٣"),
    "lines": FORM.close("edit a 1 x\ny"),
}


@every_family
def test_bad_turns_are_answered(name: str) -> None:
    environment, task = made(FAMILIES[name])
    environment.max_turns = 100
    environment.reset(task)
    for what, turn in BAD_TURNS.items():
        step = environment.step(turn)
        assert not step.done and step.reward == 0.0, what
        (said,) = readers.texts(step.tokens)
        assert said.startswith("error: ") and len(said) < 80, what
        assert step.tokens[-1] == FORM.roles["assistant"]
    rest = play_on(environment)
    assert rest.info["success"]


@every_family
def test_no_turn_raises(name: str) -> None:
    environment, task = made(FAMILIES[name])
    environment.max_turns = 10_000
    environment.reset(task)
    rng = np.random.default_rng(0)
    for _ in range(400):
        turn = list(
            environment.expert()
            if rng.random() < 0.7
            else environment.mistake(rng, False)
        )
        for _ in range(int(rng.integers(4))):
            at = int(rng.integers(len(turn)))
            turn[at : at + int(rng.integers(3))] = rng.integers(
                0, 272 if rng.random() < 0.1 else 128, int(rng.integers(3))
            ).tolist()
            turn.append(FORM.end)
            turn = turn[: turn.index(FORM.end) + 1]
        step = environment.step(turn)
        assert np.isfinite(step.reward) and (step.tokens or step.done)
        if step.done:
            environment.reset(task._replace(seed=int(rng.integers(100))))


def play_on(environment):
    while not (step := environment.step(environment.expert())).done:
        pass
    return step


@every_family
def test_episodes_end_by_themselves(name: str) -> None:
    environment, task = made(FAMILIES[name])
    with pytest.raises(RuntimeError, match="reset the environment"):
        specs.make_of(task, FORM).step(FORM.close("dance"))
    expert = turns_of(expert_episode(environment, task))
    environment.reset(task)
    for turn in range(1, 4 * expert + 9):
        step = environment.step(FORM.close("dance"))
        assert step.done == (turn == 4 * expert + 8)
    assert step.reward == 0.0 and step.info["out_of_turns"]
    assert not step.info["success"]
    with pytest.raises(RuntimeError, match="reset the environment"):
        environment.step(FORM.close("dance"))
    environment.max_turns = 1
    environment.reset(task)
    assert environment.step(FORM.close("dance")).done


@every_family
def test_what_does_not_fit_is_refused_when_made(name: str) -> None:
    text = FAMILIES[name].partition(":length")[0]
    (spec,) = specs.parse(f"{text}:length=64")
    with pytest.raises(
        UserError, match=r"takes \d+ tokens, more than length=64; raise"
    ):
        specs.make(spec, FORM)
    (spec,) = specs.parse(f"{text.replace('difficulty=', 'difficulty=100')}:length=1M")
    with pytest.raises(UserError, match=r"difficulty=\d+: must be from 1 to"):
        specs.make(spec, FORM)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tools:difficulty=0", "difficulty=0: must be from 1 to 500"),
        ("tools:length=0", "length=0: must be from 1"),
        ("tools:length=5M", "must be from 1 to 4194304"),
        ("tools:process=-1", "process=-1.0"),
        ("tools:process=nan", "process=nan"),
        ("tools:max_turns=-1", "max_turns=-1"),
        ("tools:distractors=10", "distractors=10: must be from 0 to 9"),
        ("tools:fails=2", "fails=2.0: must be from 0 to 1"),
        ("documents:pages=0", "pages=0: must be from 1 to 999"),
        ("documents:pages=900:length=1M", "lower one of them"),
        ("documents:distractors=101", "from 0 to 100"),
        ("documents:mode=x", "mode='x': must be one of tools, prompt"),
        ("code:kind=x", "kind='x': must be one of rename, repair"),
        ("code:distractors=5", "from 0 to 4"),
    ],
)
def test_wrong_dials_are_named(text: str, match: str) -> None:
    (spec,) = specs.parse(text)
    with pytest.raises(UserError, match=match):
        specs.make(spec, FORM)


def test_seeds_of_tasks_are_not_negative() -> None:
    environment, task = made(FAMILIES["tools"])
    with pytest.raises(UserError, match="seed=-1"):
        environment.reset(task._replace(seed=-1))
