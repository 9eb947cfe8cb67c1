"""A curriculum that is cut in the middle of a stage ends with the same bits."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from kimi_jax.curriculum import criteria, driver
from kimi_jax.curriculum.stages import make_stages
from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import MetricsWriter, read_metrics
from kimi_jax.train import loop, session
from tests import tiny
from tests.train.test_loop import SMALL, interrupt_after, stored

SIMPLE = ("optimizer.kind=adamw", "model.residual.kind=none")
STAGES = (
    {
        "length": 16,
        "tokens": 128,
        "batch_tokens": 64,
        "until": {"position_gap": 50.0},
        "rounds": 2,
        "optimizer.final_fraction": 1.0,
    },
    {
        "length": 32,
        "tokens": 256,
        "batch_tokens": 64,
        "long_share": 0.5,
        "mesh.fsdp": 2,
        "optimizer.learning_rate": 1e-3,
    },
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 12 to 200 bytes."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    rng = np.random.default_rng(0)
    sizes = rng.integers(12, 200, 60)
    texts = ["".join(rng.choice(list("abc \n"), size)) for size in sizes]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make(corpus, *stages):
    common = (f"data.sources={corpus}", *SMALL, *SIMPLE)
    return make_stages([dict(stage) for stage in stages], tiny.values(), common)


def run(stages, path):
    with open(os.devnull, "w") as quiet:
        driver.run(stages, str(path), console=Console(file=quiet))


def records(root, stage, kind):
    found = read_metrics(root / stage / "metrics.jsonl")
    return [(r["step"], r["loss"]) for r in found if r["kind"] == kind]


def decisions(root):
    found = json.loads((root / driver.DECISIONS).read_text())["decisions"]
    return [(d["stage"], d["round"], d["action"]) for d in found]


@pytest.fixture
def one_more_round(monkeypatch):
    """Stage 1 stays once, whatever it measures."""
    judge = criteria.judge

    def strict(until, evaluations, length, rounds_left, recall):
        verdict = judge(until, evaluations, length, rounds_left, recall)
        return verdict._replace(action="stay") if rounds_left else verdict

    monkeypatch.setattr(criteria, "judge", strict)


@pytest.fixture
def compiled_once():
    """Equal programs of several runs are compiled once, small ones too."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    yield
    jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once", "one_more_round")
def test_a_curriculum_cut_in_a_stage_resumes_to_the_same_bits(
    corpus, tmp_path, monkeypatch
):
    # Their own tests look at these, and drawing takes longer than training.
    monkeypatch.setattr(loop, "_write_sample", lambda *_: None)
    monkeypatch.setattr(loop, "build_report", lambda folder: folder)
    stages = make(corpus, *STAGES)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    hand_over = driver.hand_over
    with monkeypatch.context() as patch:

        def and_cut(*args):
            hand_over(*args)
            interrupt_after(patch, 1)

        patch.setattr(driver, "hand_over", and_cut)
        with pytest.raises(session.Interrupted, match="SIGINT after step 1"):
            run(stages, parts)
    # The same stage 1, and a stage 2 that nothing interrupts.
    shutil.copytree(parts, whole, symlinks=True)
    shutil.rmtree(whole / "stage_02_32")
    run(stages, whole)
    run(stages, parts)
    assert decisions(parts) == decisions(whole)
    assert decisions(whole) == [
        ("stage_01_16", 1, "stay"),
        ("stage_01_16", 2, "advance"),
        ("stage_02_32", 1, "advance"),
    ]
    assert [s for s, _ in records(whole, "stage_01_16", "train")] == [1, 2, 3, 4]
    losses = records(whole, "stage_02_32", "train")
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert records(parts, "stage_02_32", "train") == losses
    assert records(parts, "stage_02_32", "eval") == records(
        whole, "stage_02_32", "eval"
    )
    want, got = stored(whole / "stage_02_32"), stored(parts / "stage_02_32")
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    # The moments of stage 1 went along: Adam has counted every step of the run, the
    # learning rate those of the stage.
    assert {int(x) for name, x in want.items() if name.endswith("count")} == {4, 8}
    page = (parts / "report.md").read_text()
    assert "| stage_01_16 | 1 | stay | position_gap " in page
    assert "[stage_02_32](stage_02_32/report.md) | 32 | 4 | 256 |" in page
    # All is done: nothing runs again.
    before = (parts / "stage_02_32" / "metrics.jsonl").read_bytes()
    run(stages, parts)
    assert (parts / "stage_02_32" / "metrics.jsonl").read_bytes() == before


def train_nothing(cfg, path, **_):
    """Leaves what a run of two steps does, with these evaluations."""
    with MetricsWriter(path) as metrics:
        metrics.write("eval", cfg.train.steps, loss=3.0, bits_per_byte=4.0)
        metrics.write("run", cfg.train.steps, event="end")
    (pathlib.Path(path) / "checkpoints" / "2").mkdir(parents=True)


def test_a_stage_that_fails_its_criteria_stops_the_run(corpus, tmp_path, monkeypatch):
    """Training is left out: the evaluations are given."""

    monkeypatch.setattr(driver.loop, "train", train_nothing)
    hard = STAGES[0] | {"until": {"validation_loss": 2.0}, "rounds": 1}
    with pytest.raises(
        driver.Stopped, match="validation_loss 3, not met: 2; rounds left: 0"
    ):
        run(make(corpus, hard), tmp_path / "run")
    assert decisions(tmp_path / "run") == [("stage_01_16", 1, "stop")]
    page = (tmp_path / "run" / "report.md").read_text()
    assert "| stage_01_16 | 1 | stop | validation_loss 3, not met: 2;" in page
    # Relaxed, it goes on from where it was, without training again.
    monkeypatch.setattr(driver.loop, "train", None)
    easy = hard | {"until": {"validation_loss": 3.5}}
    run(make(corpus, easy), tmp_path / "run")
    assert decisions(tmp_path / "run") == [("stage_01_16", 1, "advance")]


def test_needles_are_counted_at_the_length_of_the_stage(corpus, tmp_path, monkeypatch):
    """Training and evaluation are left out: what they find is given."""

    asked = []

    def evaluate(cfg, checkpoint, tasks, path, console):
        asked.append((pathlib.Path(checkpoint).name, tasks, pathlib.Path(path).name))
        found = tmp_path / "results.json"
        found.write_text(json.dumps({"results": [{"accuracy": 0.4}]}))
        return found

    monkeypatch.setattr(driver.loop, "train", train_nothing)
    monkeypatch.setattr(driver, "evaluate", evaluate)
    hard = STAGES[0] | {"length": 256, "batch_tokens": 512, "tokens": 1024, "rounds": 1}
    hard["until"] = {"needle_recall": 0.9}
    with pytest.raises(driver.Stopped, match=r"needle_recall 0.4, not met: 0.9"):
        run(make(corpus, hard), tmp_path / "run")
    run(make(corpus, hard | {"until": {"needle_recall": 0.3}}), tmp_path / "run")
    assert decisions(tmp_path / "run") == [("stage_01_256", 1, "advance")]
    assert asked == [("stage_01_256", "needle:length=256", "stage_01_256_step_2")] * 2
    with pytest.raises(UserError, match=r"(?s)stage_01_16: .*needle:length=16"):
        run(make(corpus, STAGES[0] | {"until": {"needle_recall": 0.9}}), tmp_path / "x")
    with pytest.raises(UserError, match=r"needle_recall=1\.5: must be a share"):
        make(corpus, hard | {"until": {"needle_recall": 1.5}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh.data": 16}, "stage_02_32: config.mesh: data=16 on 8 cpu devices"),
        (
            {"length": 512, "until": {"position_gap": 0.0}},
            "stage_02_512: position_gap can never be met",
        ),
        ({"length": 512, "long_share": 0.5}, "stage_02_512: .*no training documents"),
    ],
)
def test_what_would_stop_a_later_stage_is_found_first(corpus, tmp_path, change, words):
    first = {"length": 32, "tokens": 4096, "batch_tokens": 4096}
    with pytest.raises(UserError, match=words):
        run(make(corpus, first, first | change), tmp_path / "run")
    assert not (tmp_path / "run" / "stage_01_32").exists()


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not empty and holds no curriculum"):
        run(make(corpus, *STAGES), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
