"""docs/environments.md: its example runs, its episodes are real, its dials are all."""

import re
import textwrap
from pathlib import Path

import pytest

from kimi_jax.environments import specs
from kimi_jax.environments.episodes import expert_episode, guard
from tests.environments.readers import FORM, made

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "guess.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    (text,) = re.findall(r"`(guess:Guess\S*)`", PAGE)
    environment, task = made(text, seed=3)
    for seed in range(20):
        episode = expert_episode(guard(environment), task._replace(seed=seed))
        costs = [-0.05 * turn for turn in range(1, len(episode.spans) + 1)]
        costs[-1] += 1.0
        assert episode.success and episode.rewards == pytest.approx(costs)
        assert len(episode.spans) <= 4
    environment.reset(task)
    step = environment.step(FORM.close("a dozen"))
    assert "error: a number" in FORM.show(step.tokens) and not step.done


def test_the_episodes_are_what_the_experts_play() -> None:
    found = re.findall(r"^`(\w+:\S+)`, seed (\d+)\n\n((?:    .*\n)+)", PAGE, re.M)
    assert [spec.partition(":")[0] for spec, _, _ in found] == [*specs.ENVIRONMENTS]
    for spec, seed, shown in found:
        environment, task = made(spec, int(seed))
        episode = expert_episode(environment, task)
        lines = [line.rstrip() for line in FORM.show(episode.tokens).split("\n")]
        assert "\n".join(lines) == textwrap.dedent(shown).rstrip("\n")


def test_every_dial_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    common = {"difficulty", "length", "reward"}
    assert listed == common.union(*map(specs.dials, specs.ENVIRONMENTS.values()))
