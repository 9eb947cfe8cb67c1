"""The commands of many runs and of a run in stages, as a person types them."""

import pathlib

import pytest

from tests.test_experiments import command

CONFIG = '''"""A run that fails."""
from configs import common
from configs.hyper import grid

def get_hyper():
    return grid("data.sources", ("none.txt",))

def get_config():
    return common.base()
'''


@pytest.fixture
def config(tmp_path):
    (tmp_path / "one.py").write_text(CONFIG)
    return f"--config={tmp_path / 'one.py'}"


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_reason(config, tmp_path):
    root = tmp_path / "runs"
    done = command("experiments.sweep", config, f"--workdir={root}", "--run=local:1")
    assert done.returncode == 1, done.stderr
    assert "1 settings, of which 0 are finished already" in done.stdout
    (log,) = (root / "logs").iterdir()
    reason = "exit code 1: source 'none.txt' does not exist"
    (line,) = [x for x in done.stdout.splitlines() if x.endswith(f"see {log}")]
    assert line.startswith(f"{log.stem} failed: {reason}")
    assert "does not exist" in log.read_text()
    done = command("experiments.sweep", config, f"--workdir={root}", "--list")
    assert done.returncode == 0 and f"{log.stem}  failed" in done.stdout


def test_mistakes_in_a_sweep_are_named_and_nothing_runs(config, tmp_path):
    done = command(
        "experiments.sweep",
        config,
        f"--workdir={tmp_path / 'runs'}",
        "--config.train.stepz=3",
        "--run=local:2",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "setting 1 (sources=('none.txt',))" in done.stderr
    assert "did you mean config.train.steps?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_stages_of_a_curriculum_are_listed():
    done = command(
        "experiments.curriculum",
        "--config=configs/curriculum_k3.py",
        "--workdir=nowhere",
        "--list",
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    (third,) = [row for row in rows if row[:1] == ["stage_03_262144"]]
    assert third[1] == "64" and "context=32" in third
    assert "--config.train.seq_len=262144 --config.train.batch_size=64" in done.stdout
    assert not pathlib.Path("nowhere").exists()
