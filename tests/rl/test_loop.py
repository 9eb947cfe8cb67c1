"""A run of reinforcement learning: resuming is exact, and what goes wrong says so."""

import json
import os
import signal

import numpy as np
import pytest
from rich.console import Console

from configs import common
from kimi_jax import config_io
from kimi_jax.errors import UserError
from kimi_jax.evals.run import evaluate
from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.rl import archive, loop, storage
from kimi_jax.rl.rollout import Rollouts
from kimi_jax.train import checkpoint_files
from kimi_jax.train.session import Interrupted
from tests import tiny

# What a run does around its steps does not depend on the model: one that compiles fast.
SMALL = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.residual.kind=none",
    "optimizer.kind=adamw",
)


MESH = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)


def make(*overrides, change=lambda rl: None):
    values = tiny.values()
    values.rl = common.rl()
    values.rl.update(
        environments=("tests.rl.toys:Even",),
        iterations=3,
        groups=2,
        group_size=3,
        turn_tokens=6,
        max_turns=3,
        max_tokens=33,
        max_calls=6,
        slots=4,
        decode_steps=4,
        eval_tasks=2,
        max_staleness=3,
        reuse=0.25,
    )
    change(values.rl)
    values.train.update(
        steps=3, seq_len=32, batch_size=4, eval_every=3, checkpoint_every=1
    )
    return config_io.from_dict(values, [*SMALL, *overrides])


def reinforce(workdir, *overrides, change=lambda rl: None):
    """A silent run; returns its workdir."""
    with open(os.devnull, "w") as quiet:
        cfg = make(*overrides, change=change)
        loop.reinforce(cfg, str(workdir), console=Console(file=quiet))
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run that nothing has interrupted."""
    return reinforce(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def run(tmp_path):
    """Trains with overrides in a workdir below `tmp_path`; returns the workdir."""

    def start(name, *overrides, **options):
        return reinforce(tmp_path / name, *overrides, **options)

    return start


def stored(workdir):
    """Canonical arrays of the newest checkpoint, and what is beside them."""
    folder = checkpoint_files.find(workdir)
    flat = checkpoint_files.read_arrays(folder, checkpoint_files.stored_arrays(folder))
    kept = storage.from_bytes(checkpoint_files.read_extra(folder))
    # Times differ, and so do the rests of pages that nothing was written to.
    for values in [*kept["rollouts"]["members"], *kept["rollouts"]["sequences"]]:
        values.pop("seconds", None)
        values.pop("pages", None)
    return {k: np.asarray(x) for k, x in flat.items()}, storage.to_bytes(kept)


def curve(workdir):
    """What an iteration comes to, wall times apart."""
    records = [r for r in read_metrics(workdir / "metrics.jsonl") if "rl" in r]
    return [
        {k: v for k, v in r["rl"].items() if not k.endswith(("seconds", "per_second"))}
        for r in records
    ]


def during(monkeypatch, iteration, happens):
    """Call `happens` as the trajectories of an iteration begin to be written."""
    play = Rollouts.run

    def run(self, *arguments, **options):
        if options["version"] == iteration and options["group_size"] > 1:
            happens()
        return play(self, *arguments, **options)

    monkeypatch.setattr(Rollouts, "run", run)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def die():
    raise MemoryError("killed")


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_bits(whole, run, monkeypatch):
    # Saving as such changes nothing either.
    rarely = "train.checkpoint_every=9"
    with monkeypatch.context() as patch:
        during(patch, 0, interrupt)
        with pytest.raises(Interrupted, match="SIGINT after step 1") as caught:
            run("parts", rarely)
    assert caught.value.exit_code == 130
    with monkeypatch.context() as patch:
        during(patch, 2, die)
        with pytest.raises(MemoryError):
            run("parts", rarely)
    parts = run("parts", rarely)
    (want, beside), (got, also) = stored(whole), stored(parts)
    assert want.keys() == got.keys() and int(got["step"]) == 3
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert beside == also and b"toys" in beside
    assert curve(parts) == curve(whole)
    trained = [r for r in curve(whole) if "iteration" in r]
    assert [r["iteration"] for r in trained] == [1, 2, 3]
    # Trajectories were cut in the middle and went on: the point of the test.
    assert all(r["unfinished"] > 0 for r in trained)
    assert trained[-1]["staleness"] > 0 and trained[-1]["optimizer_steps"] > 0
    assert max(r["mismatch"] for r in trained if "mismatch" in r) < 1e-4
    for iteration in archive.iterations(whole):
        assert archive.read(parts, iteration) == archive.read(whole, iteration)
    summary = json.loads((parts / "summary.json").read_text())
    assert summary["success_on"] == "held-out tasks" and summary["iterations"] == 3
    assert "## Reinforcement learning" in (parts / "report.md").read_text()
    with pytest.raises(UserError, match=r"config.rl.groups: 2 in the workdir, 3 now"):
        run("parts", rarely, "rl.groups=3")


def test_what_cannot_run_is_refused_before_anything_is_written(run, tmp_path):
    for override, words in (
        ("rl=none", "experiments.train for supervised training"),
        ("rl.environments=tool", "did you mean"),
        ("rl.environments=tools:difficulty=3:length=32", "raise length to"),
        ("data.tokenizer=symbols:9", "tokenizer"),
    ):
        with pytest.raises(UserError, match=words):
            run("refused", override)
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_separate_meshes_references_and_a_teacher(whole, run, tmp_path):
    """Everything that an iteration may read besides, at once; then an evaluation."""
    apart = run(
        "apart",
        f"train.init_from={whole}",
        f"rl.teacher={whole}",
        "rl.distill_weight=0.5",
        "rl.kl_weight=0.1",
        "rl.rewards=shuffled",
        "rl.iterations=2",
        "train.steps=2",
        "rl.max_calls=none",
        "rl.keep_trajectories=none",
        "mesh.fsdp=2",
        change=lambda rl: rl.update(rollout_mesh={**MESH, "data": 2}),
    )
    before, after = (r for r in curve(apart) if "iteration" in r)
    # At first policy, reference and teacher are one.
    assert abs(before["kl_teacher"]) < 1e-5 and before["reference_kl"] < 1e-9
    assert after["reference_kl"] > 1e-7 and after["mismatch"] < 1e-4
    assert before["staleness"] == after["staleness"] == 0
    # All of an iteration is kept, with advantages that sum to zero in each group.
    kept = archive.read(apart, 1)
    assert len(kept) == 6 and {len(e.trajectory.turns) for e in kept} == {2}
    groups = {}
    for entry in kept:
        groups.setdefault(entry.trajectory.group, []).append(entry.advantages[0])
    assert {*groups} == {2, 3}
    assert all(abs(sum(values)) < 1e-6 for values in groups.values())
    words = r"rollout_mesh: 8 devices after the 1 of config.mesh, and there are 8"
    with pytest.raises(UserError, match=words):
        run("many", change=lambda rl: rl.update(rollout_mesh={**MESH, "data": 8}))
    results = evaluate(
        make("evaluation.examples=4", "rl.slots=2"),
        str(apart),
        "episodes:tests.rl.toys:Even:difficulty=1/2:length=1K:temperature=1.0",
        str(tmp_path / "evaluation"),
        Console(quiet=True),
    )
    records = json.loads(results.read_text())["results"]
    assert [r["dials"]["difficulty"] for r in records] == [1, 2]
    for record in records:
        assert record["examples"] == 4 and record["turns"] == 2
        assert 0.0 <= record["success"] <= 1.0
    report = (tmp_path / "evaluation" / "report.md").read_text()
    assert "## Episodes: acting in environments" in report
    assert "plots/episodes_tests.rl.toys_Even_at_1.png" in report
