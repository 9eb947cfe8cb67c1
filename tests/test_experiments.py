"""The commands as a user types them: output, exit codes, messages."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from experiments import cli

ROOT = pathlib.Path(__file__).parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    # One device, and the optimiser of LLVM off as in conftest.
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_overrides_are_split_from_flags():
    rest, overrides = cli.split_overrides(
        [
            "train",
            "--config=configs/k3.py",
            "--config.model.width=8",
            "--config.train.steps",
            "5",
            "--noconfig.optimizer.muon_per_head",
            "--config.model.mla.output_gate",
            "--workdir=x",
        ]
    )
    assert rest == ["train", "--config=configs/k3.py", "--workdir=x"]
    assert overrides == [
        "model.width=8",
        "train.steps=5",
        "optimizer.muon_per_head=false",
        "model.mla.output_gate",
    ]


def test_doctor_counts_k3_without_allocating_it():
    done = command("experiments.doctor", "--config=configs/k3.py")
    assert done.returncode == 0, done.stderr
    assert "2,779.48 B parameters, 104.19 B active" in done.stdout
    assert "round trip" in done.stdout
    assert "93 layers: 69 kda, 1 mlp, 92 moe, 24 mla" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    query = "layer_*/attention/kda/q muon 96 x [7168, 128] 0.1"
    assert query.split() in rows
    assert ["layer_*/attention/kda/dt_bias", "adamw", "-", "none"] in rows


def test_mistakes_are_one_message_and_exit_1(tmp_path):
    workdir = tmp_path / "run"
    done = command(
        "experiments.train",
        "--config=configs/quickstart.py",
        f"--workdir={workdir}",
        "--config.model.widht=3",
        "--config.train.steps=ten",
        "--config.train.seq_len",
        "--config.model.mla.output_gate",
    )
    assert done.returncode == 1
    assert "did you mean config.model.width?" in done.stderr
    assert "config.train.steps='ten': must be int" in done.stderr
    assert "write --config.train.seq_len=VALUE" in done.stderr
    assert "has 3 problems" in done.stderr
    assert "Traceback" not in done.stderr and not workdir.exists()


def test_store_prints_what_it_made_and_makes_it_once(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"To be, or not to be")
    arguments = (
        "experiments.store",
        "--config=configs/quickstart.py",
        f"--config.data.sources={tmp_path / 'text.txt'}",
        f"--workdir={tmp_path / 'store'}",
    )
    for last in ("made in", "verified in"):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        words = " ".join(done.stdout.split())
        assert "documents 1 " in words and "tokens 21 (uint16)" in words
        assert f"written to {tmp_path / 'store'} {last}" in words
    assert (tmp_path / "store" / "store.json").exists()
    done = command(*arguments, f"--config.data.sources={tmp_path / 'store'}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is a token store, there is nothing to tokenise" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config=configs/quickstat.py",), "did you mean configs/quickstart.py?"),
        (("--config=configs/quickstart.py:x",), "of this file takes no argument"),
        (("--config=configs/k3_dial.py:width=3",), "depth=NUMBER"),
    ],
)
def test_a_config_that_cannot_be_loaded(arguments, words):
    done = command("experiments.doctor", *arguments)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_used_ends_all_processes(tmp_path):
    """One that just returned would wait in JAX's exit for the others."""
    file = tmp_path / "missing"
    program = f"""
from experiments import cli
from kimi_jax import distributed
distributed.leave = lambda code: print("left with", code)
cli.run(lambda _: open({str(file)!r}).close())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout == "left with 1\n"
    assert done.stderr == f"error: {file}: No such file or directory\n"


def test_help_tells_flags_fields_and_the_config():
    done = command("experiments.train", "--config=configs/mqar.py", "--help")
    assert done.returncode == 0, done.stderr
    for words in (
        "python -m experiments.train --config=configs/X.py --workdir=DIR",
        "--workdir: folder of the run",
        "--config.a.b=VALUE",
        "kimi_jax/config.py says",
        "Question:",
    ):
        assert words in done.stdout
    done = command("experiments.sample", "--help")
    assert done.returncode == 0 and "--max_tokens: most tokens" in done.stdout


def test_a_command_may_be_named_by_its_file():
    """No module here may shadow one that Python itself imports."""
    done = subprocess.run(
        [sys.executable, "experiments/train.py", "--config=configs/nowhere.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    modules = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert not modules & sys.stdlib_module_names


def test_flags_that_a_run_needs():
    done = command("experiments.train")
    assert done.returncode == 1 and "--config" in done.stderr
    assert "--workdir" in done.stderr and "Traceback" not in done.stderr


def test_doctor_examines_the_machine_without_a_config(tmp_path):
    done = command("experiments.doctor", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"jax {jax.__version__}" in rows
    assert any(f"free at {tmp_path / 'run'}" in row for row in rows)
    assert any(row.startswith("round trip over 1 devices in") for row in rows)
    assert any(row.startswith("kda kernel xla: ") for row in rows)
    assert "broken" not in done.stdout and "parameters" not in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_quickstart_command_makes_a_report(tmp_path):
    workdir = tmp_path / "run"
    done = command(
        "experiments.train",
        "--config=configs/quickstart.py",
        f"--workdir={workdir}",
        "--config.model.num_layers=1",
        "--config.model.attention=('gqa',)",
        "--config.train.steps=3",
        "--config.train.eval_batches=1",
        "--config.sample.num_tokens=8",
    )
    assert done.returncode == 0, done.stderr
    assert "report.md" in done.stdout and "fresh" in done.stdout
    assert "# " in (workdir / "report.md").read_text()
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"3"}


@pytest.mark.slow
def test_an_evaluation_from_the_command_line(tmp_path):
    folder = tmp_path / "scores"
    arguments = (
        "experiments.evaluate",
        "--config=configs/mqar.py:pairs=2,length=8",
        "--checkpoint=fresh",
        "--config.model.num_layers=1",
        "--config.model.attention=('gqa',)",
        "--config.model.ffn.num_dense_layers=1",
        "--config.model.residual.block_size=1",
        "--config.evaluation.examples=8",
    )
    tasks = "--tasks=mqar:length=8/16:pairs=2"
    done = command(*arguments, tasks, f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())["results"]
    assert [cell["dials"]["length"] for cell in results] == [8, 16]
    assert (folder / "report.md").exists() and any((folder / "plots").iterdir())
    done = command(*arguments, tasks, f"--workdir={folder}")
    assert done.returncode == 0 and "2 of them finished before" in done.stdout
    assert json.loads((folder / "results.json").read_text())["results"] == results
    missing = command("experiments.evaluate", f"--workdir={folder}")
    assert missing.returncode == 1
    assert "--config, --checkpoint, --tasks missing" in missing.stderr
    alone = command(
        "experiments.evaluate", f"--compare={folder}", f"--workdir={tmp_path / 'x'}"
    )
    assert alone.returncode == 1 and "at least two folders" in alone.stderr
