"""The smallest run that learns a task: recall, from its config to its evaluation."""

import json
import os
import runpy

import pytest
from rich.console import Console

from kimi_jax import config_io
from kimi_jax.evals import run
from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.train.loop import train


@pytest.mark.slow
def test_a_hybrid_of_two_layers_learns_recall(tmp_path) -> None:
    """At chance, 1 of 32 values, before; 99 % after; and so says the evaluation."""
    get_config = runpy.run_path("configs/mqar.py")["get_config"]
    overrides = (
        "train.steps=200",
        "train.eval_every=50",
        "train.eval_length_multiples=1",
        "train.checkpoint_every=200",
        "evaluation.examples=128",
    )
    cfg = config_io.from_dict(get_config("pairs=4,length=16"), overrides)
    workdir = tmp_path / "run"
    with open(os.devnull, "w") as quiet:
        console = Console(file=quiet)
        train(cfg, str(workdir), console=console)
        task = "mqar:pairs=4:length=16"
        path = run.evaluate(cfg, str(workdir), task, str(tmp_path / "eval"), console)
    evals = [r for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == [50, 100, 150, 200]
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["validation_accuracy"] == evals[-1]["accuracy"] >= 0.99
    assert summary["learned_step"] in (50, 100, 150, 200)
    report = (workdir / "report.md").read_text()
    assert "**Validation accuracy" in report and "plots/accuracy.png" in report
    (result,) = json.loads(path.read_text())["results"]
    # 512 answers: three standard deviations below 99 %.
    assert result["accuracy"] > 0.97
