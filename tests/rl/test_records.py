"""What trajectories say about a run, how they are kept, and how they are shown."""

import io

import numpy as np
import pytest
from rich.console import Console

from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.environments.environment import Task
from kimi_jax.environments.format import make_format
from kimi_jax.errors import UserError
from kimi_jax.rl import archive, health, viewer
from kimi_jax.rl.archive import Entry
from kimi_jax.rl.trajectory import Trajectory, Turn

FORM = make_format(load_tokenizer("bytes"))


def trajectory(
    *, reward=1.0, finished="done", difficulty=1, length=64, member=0, **info
):
    """<bos><user>7<end><assistant>get 7<end><tool>=<3><end><assistant>say 3<end>"""
    prompt = [FORM.bos, *FORM.render("user", "7"), *FORM.open("assistant")]
    first, last = FORM.close("get 7"), FORM.close("say 3")
    answer = [*FORM.render("tool", "=<3>"), *FORM.open("assistant")]
    start, again = len(prompt), len(prompt) + len(first) + len(answer)
    info = {"success": reward == 1.0, **info}
    return Trajectory(
        Task("tools", difficulty, length, 5),
        group=3,
        member=member,
        tokens=[*prompt, *first, *answer, *last],
        turns=[
            Turn(start, start + len(first), 0.25),
            Turn(again, again + len(last), reward - 0.25, info),
        ],
        logprobs=[-0.5, *[-0.01] * 4, -2.5, *[-0.1] * 6],
        versions=[*[1] * 6, *[2] * 6],
        routes=np.zeros((3, 1, 2), np.int32),
        finished=finished,
    )


def test_health_counts_what_happened():
    some = [
        trajectory(),
        trajectory(reward=0.0, difficulty=2),
        trajectory(reward=0.5, finished="tokens", length=128),
        trajectory(reward=0.0, finished="error", length=128, error="broken"),
    ]
    found = health.rollout_health(some, version=3)
    assert found["success"] == 0.25 and found["reward"] == 0.375
    assert found["truncated"] == {"tokens": 0.25, "turns": 0, "time": 0, "error": 0.25}
    assert found["environment_errors"] == 0.25 and found["turns"] == 2
    assert (found["staleness"], found["staleness_max"]) == (1.5, 2)
    assert found["by_difficulty"] == {"1": pytest.approx(1 / 3), "2": 0}
    assert found["by_length"] == {"64": 0.5, "128": 0}
    assert health.rollout_health([], 3) == {}
    groups = [some[:2], [some[1], some[3]]]
    found = health.group_health(groups)
    assert found == {"zero_variance": 0.5, "reward_spread": 0.25}


def test_trajectories_are_kept_evenly_and_come_back(tmp_path):
    entries = [Entry(trajectory(member=i), [0.5, -0.25]) for i in range(5)]
    archive.write(tmp_path, 7, entries, keep=3)
    kept = archive.read(tmp_path, 7)
    assert [entry.trajectory.member for entry in kept] == [0, 2, 4]
    assert kept[0].advantages == [0.5, -0.25]
    # All but the experts, which would take more room than all the rest.
    assert kept[0].trajectory.routes is None
    assert kept[0].trajectory.logprobs == entries[0].trajectory.logprobs
    archive.write(tmp_path, 8, entries, keep=0)
    assert archive.iterations(tmp_path) == [7]
    with pytest.raises(UserError, match="iteration 8; there are 7 to 7"):
        archive.read(tmp_path, 8)
    (tmp_path / archive.FOLDER / "iteration_000007.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        archive.read(tmp_path, 7)


def test_the_viewer_shows_roles_rewards_and_unlikely_tokens():
    entry = Entry(trajectory(), [0.5, -0.25])
    found = [
        (s.role, FORM.text_of(s.tokens), s.turn) for s in viewer.spans(entry, FORM)
    ]
    assert found == [
        ("system", "", None),
        ("user", "7", None),
        ("assistant", "get 7", 0),
        ("tool", "=<3>", None),
        ("assistant", "say 3", 1),
    ]
    printed = io.StringIO()
    Console(file=printed, width=300).print(viewer.to_text(entry, FORM))
    lines = printed.getvalue().splitlines()
    assert "success  reward 1.000  2 turns" in lines[0]
    assert any(
        "[turn 1] reward +0.250  advantage +0.500  6 tokens, mean log p -0.507, "
        "least -2.50 at token 6" in line
        for line in lines
    )
    page = viewer.to_html([entry], FORM)
    assert "=&lt;3&gt;" in page and "<script" not in page
    assert 'title="log p -2.500" style="background:rgba(220,38,38,0.50)"' in page
    failed = Entry(trajectory(reward=0.0, finished="error", error="it broke"), [])
    assert "no success (it broke)" in viewer.headline(failed)
    # An environment that failed at once has no turn of tokens at all.
    bare = Trajectory(Task("tools", 1, 64, 5), 0, 0, [], finished="error")
    assert "ended by error" in viewer.to_text(Entry(bare, []), FORM).plain
