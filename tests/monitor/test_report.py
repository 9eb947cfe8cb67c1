"""Reports of synthetic runs that look like real ones, whole, partial and damaged."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from kimi_jax.errors import UserError
from kimi_jax.monitor import plots, sections
from kimi_jax.monitor.metrics import MetricsWriter, read_metrics
from kimi_jax.monitor.report import build_report, draw, summarise
from kimi_jax.monitor.runs import layer_series, load_run

STEPS, LAYERS, MOE_LAYERS, SOURCES = 120, 8, 7, 5
UNIGRAM = 4.7712


def layer_metrics(step: int, rng: np.random.Generator) -> dict:
    depth = np.arange(MOE_LAYERS)
    violation = 0.22 + 6.0 / (1 + depth) * np.exp(-step / 5) + 0.05 * rng.random(7)
    weights = np.zeros((2 * LAYERS + 1, SOURCES))
    for row in range(2 * LAYERS + 1):
        finished = min(1 + max(row - 1, 0) // 4, SOURCES - 1) if row else 1
        logits = 1.5 * step / STEPS * np.sin(1.7 * np.arange(finished + 1) + row)
        mixed = np.exp(logits) / np.exp(logits).sum()
        weights[row, :finished], weights[row, -1] = mixed[:-1], mixed[-1]
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=1)
    return {
        "moe/max_violation": violation,
        "moe/load_entropy": 1 - 0.02 * violation,
        "moe/dead_experts": np.maximum(0, 6 - depth - step // 4),
        "moe/bias_range": 0.4 * (1 - np.exp(-step / 30)) * (1 + 0.1 * depth),
        "moe/layer_index": depth + 1,
        "moe/activation_max": 3.0 + depth + (step == STEPS // 2),
        "mlp/activation_max": [math.nan if step == 1 else 2.5],
        "residual/weights": weights,
        "residual/entropy": entropy,
        "residual/rms": 1 + 0.1 * np.arange(2 * LAYERS),
    }


def speed(step: int) -> dict:
    return {
        "flops_per_second": 2.5e12,
        "mfu": 0.41,
        "data_wait_share": 0.01,
        "productive_seconds": 0.45e-6 * step,
        "productive_share": 0.9,
        "groups": {
            "gradient_rms/kda": 1e-3 / step,
            "gradient_rms/router": 1e-4 / step,
            "update_head_spread/kda": 1.2,
            "update_head_spread/mla": 1.4,
            "qk_clip/max_logit": 30.0 + step,
        },
    }


def evaluation(bits: float) -> dict:
    loss = bits * math.log(2)

    def at(length: int, **more) -> dict:
        upto = [2**k for k in range(int(math.log2(length)) + 1)]
        return {
            "loss": loss,
            "bits_per_byte": bits,
            "tokens": 10 * length,
            "position_loss": {str(n): loss + 1 / n for n in upto},
            "position_tokens": {str(n): n for n in upto},
            **more,
        }

    beyond = {"beyond_loss": 1.25, "beyond_bits_per_byte": 1.8, "beyond_tokens": 77}
    lengths = {"256": at(256), "1024": at(1024, **beyond)}
    return {"bits_per_byte": bits, "loss": loss, "seconds": 2.0, "lengths": lengths}


def write_run(workdir, layers=layer_metrics, evaluate=True, finish=True) -> None:
    rng = np.random.default_rng(0)
    config = {
        "name": "quickstart",
        "model": {"num_layers": LAYERS, "attention": ["kda*3", "mla"], "note": "a|b"},
        "train": {"steps": STEPS},
    }
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config))
    with MetricsWriter(workdir) as writer:
        writer.write(
            "run",
            0,
            event="start",
            command="python -m experiments.train --config=configs/quickstart.py",
            unigram_bits_per_byte=UNIGRAM,
            parameters=3_456_789,
            corpus="default",
        )
        for step in range(1, STEPS + 1):
            bits = 2.4 + 5.6 * math.exp(-step / 18) + 0.06 * rng.standard_normal()
            writer.write(
                "train",
                step,
                loss=bits * math.log(2),
                bits_per_byte=bits,
                learning_rate=3e-3 * min(step / 10, 0.5 + 0.5 * math.cos(step / 40)),
                gradient_norm=0.4 + 4 * math.exp(-step / 10) + 0.1 * rng.random(),
                tokens=step * 4096,
                tokens_per_second=9000 + 600 * rng.standard_normal(),
                step_seconds=0.45,
                layers=layers(step, rng) if layers else {},
                **(speed(step) if layers else {}),
            )
            if evaluate and step % 20 == 0:
                bits = 2.5 + 5.6 * math.exp(-step / 18)
                writer.write("eval", step, **evaluation(bits))
                writer.write("checkpoint", step, seconds=3, blocking_seconds=0.5)
        if finish:
            writer.write("run", STEPS, event="end")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    write_run(path)
    (path / "sample.txt").write_text("Once ```upon``` a time\n")
    build_report(path)
    return path


def test_summary_holds_the_final_numbers(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    records = read_metrics(workdir / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    violations = np.array([r["layers"]["moe/max_violation"] for r in train])

    assert summary["name"] == "quickstart"
    assert summary["finished"] is True
    assert (summary["step"], summary["steps_planned"]) == (STEPS, STEPS)
    assert summary["tokens"] == STEPS * 4096
    assert summary["parameters"] == 3_456_789
    assert summary["unigram_bits_per_byte"] == UNIGRAM
    assert summary["train_bits_per_byte"] == train[-1]["bits_per_byte"]
    assert summary["validation_bits_per_byte"] == evaluations[-1]["bits_per_byte"]
    assert summary["max_violation"] == violations[-1].max()
    expected = violations[-STEPS // 10 :].mean(axis=0).max()
    assert summary["max_violation_tail"] == pytest.approx(expected, rel=1e-12)
    assert summary["dead_experts"] == 0
    assert summary["activation_max"] == 3.0 + MOE_LAYERS
    assert summary["residual_rms"] == pytest.approx(1 + 0.1 * (2 * LAYERS - 1))
    assert summary["head_spread"] == pytest.approx(1.3)
    assert summary["beyond_loss"] == 1.25 and summary["beyond_accuracy"] is None
    expected = records[-1]["time"] - records[0]["time"]
    assert summary["seconds"] == pytest.approx(expected, abs=1e-6)


def test_report_begins_with_the_numbers_and_holds_every_section(workdir):
    text = (workdir / "report.md").read_text()
    summary = json.loads((workdir / "summary.json").read_text())
    head = text.splitlines()[:3]
    assert head[0] == "# quickstart"
    assert f"{summary['validation_bits_per_byte']:.4f} bits per byte" in head[2]
    assert f"{UNIGRAM:.4f}" in head[2]
    headings = ["Loss", "Optimizer", "Loss by position", "Speed", "Components"]
    for heading in (*headings, "Routing", "Residual stream", "Sample"):
        assert f"\n## {heading}\n" in text
    assert "python -m experiments.train --config=configs/quickstart.py" in text
    assert "| `model.num_layers` | `8` |" in text
    # A bar inside a value must not open a table column, nor backticks a fence.
    assert r"`a\|b`" in text
    assert "````text\nOnce ```upon``` a time\n````" in text
    layers = load_run(workdir).train[STEPS]["layers"]
    for layer, violation in enumerate(layers["moe/max_violation"], start=1):
        assert f"\n| {layer} | {violation:.3f} |" in text


def test_speed_time_and_positions_are_in_the_report(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    text = (workdir / "report.md").read_text()
    run = load_run(workdir)
    assert summary["mfu"] == 0.41 and summary["flops_per_second"] == 2.5e12
    assert summary["data_wait_share"] == pytest.approx(0.01)
    assert summary["checkpoint_seconds"] == 0.5
    steps = 0.45e-6 * STEPS
    assert summary["productive_share"] == pytest.approx(steps / run.elapsed)
    assert "| model FLOP utilisation, median | 41.0% |" in text
    bits = summary["validation_bits_per_byte"]
    loss = summary["validation_loss"]
    assert (
        f"| 1,024 | {loss:.4f} | {bits:.4f} | 1.2500 | 1.8000 | 10,240 | 77 |" in text
    )
    assert f"| 256 | {loss:.4f} | {bits:.4f} | - | - | 2,560 | 0 |" in text
    figures = draw(run)
    assert [axis.get_title(loc="left") for axis in figures["groups"].axes] == [
        "gradient_rms",
        "qk_clip/max_logit",
        "update_head_spread",
    ]
    (axis,) = figures["positions"].axes
    short, long, _ = axis.get_lines()
    assert list(short.get_xdata()) == [2.0**k for k in range(9)]
    assert long.get_ydata()[-1] == pytest.approx(loss + 1 / 1024)


def test_every_linked_plot_is_a_picture(workdir):
    text = (workdir / "report.md").read_text()
    links = [
        line.split("(")[1].rstrip(")") for line in text.splitlines() if "![" in line
    ]
    assert links == [
        f"plots/{name}.png"
        for name in (
            "loss",
            "optimizer",
            "positions",
            "speed",
            "groups",
            "routing",
            "residual_map",
            "residual_entropy",
            "residual_rms",
        )
    ]
    for link in links:
        image = imread(workdir / link)[..., :3]
        assert image.shape[0] >= 400 and image.shape[1] >= 900
        ink = (image < 0.99).any(axis=-1).mean()
        assert 0.01 < ink < 0.9, link
        colors = (image * 9).astype(int) @ [100, 10, 1]
        assert len(np.unique(colors)) > 8, link


def test_a_second_report_is_identical(workdir):
    files = ["report.md", "summary.json", "plots/loss.png", "plots/residual_map.png"]
    before = [(workdir / name).read_bytes() for name in files]
    build_report(workdir)
    assert [(workdir / name).read_bytes() for name in files] == before
    assert not list(workdir.rglob("*.tmp"))


def test_a_dense_model_without_evaluation_has_fewer_sections(tmp_path):
    write_run(tmp_path, layers=None, evaluate=False, finish=False)
    (tmp_path / "config.json").unlink()
    text = build_report(tmp_path).read_text()
    for missing in ("Routing", "Attention residuals", "Sample", "Config"):
        assert f"## {missing}" not in text
    assert sorted(path.stem for path in (tmp_path / "plots").iterdir()) == [
        "loss",
        "optimizer",
        "speed",
    ]
    assert "**Validation - bits per byte**" in text
    assert "not finished" in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation_bits_per_byte"] is None
    assert summary["max_violation"] is None


def test_accuracy_of_a_task_is_shown(tmp_path):
    """Learned at step 60: half right before, all after."""
    with MetricsWriter(tmp_path) as writer:
        writer.write("run", 0, event="start", unigram_bits_per_byte=5.0)
        for step in (20, 40, 60, 80):
            right = {"accuracy": 0.5 if step < 60 else 0.999}
            lengths = evaluation(1.0)["lengths"]
            shown = {n: record | right for n, record in lengths.items()}
            writer.write("eval", step, **evaluation(1.0) | right | {"lengths": shown})
    report = build_report(tmp_path).read_text()
    assert "**Validation accuracy 0.9990**" in report
    assert "| first step with an accuracy of 99% | 60 |" in report
    assert "| 1,024 | 0.9990 | 10,240 |" in report
    assert (tmp_path / "plots" / "accuracy.png").exists()


def test_partial_runs(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write("run", 0, event="start", parameters={"kda": 10, "moe": 20})
    # Killed while compiling: nothing to draw yet, but the run is described.
    text = build_report(tmp_path).read_text()
    assert "after 0 steps" in text and "![" not in text
    assert '{"kda": 10, "moe": 20}' in text

    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write("run", 0, event="resume")
        layers = layer_metrics(1, np.random.default_rng(0))
        writer.write("train", 1, loss=5.5, bits_per_byte=7.9, layers=layers)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"train","step":2,"lo')
    text = build_report(tmp_path).read_text()
    assert "7.9000" in text and "Resumed at step 0." in text
    assert text.count("![") == 5


def test_a_loss_that_diverges_is_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step, loss in enumerate([2.0, 1.5, math.nan, math.inf], start=1):
            writer.write("train", step, loss=loss, bits_per_byte=loss * 1.4427)
    assert "first not finite at step 3." in build_report(tmp_path).read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["first_non_finite_step"] == 3
    assert summary["train_loss"] == "Infinity"


def test_seconds_leave_out_the_time_between_sessions(tmp_path):
    events = [("run", 0, 0, "start"), ("train", 1, 10, None), ("train", 2, 14, None)]
    events += [("run", 2, 1000, "resume"), ("train", 3, 1007, None)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for kind, step, time, event in events:
            record = {"kind": kind, "step": step, "time": time, "event": event}
            if kind == "train":
                record["productive_seconds"] = 4.0 * step
            file.write(json.dumps(record) + "\n")
        file.write('{"kind":"eval","step":3,"time":1010,"seconds":2}\n')
        saved = '"seconds":3,"blocking_seconds":0.5'
        file.write(f'{{"kind":"checkpoint","step":3,"time":1011,{saved}}}\n')
    run = load_run(tmp_path)
    assert run.seconds == 14 + 11 and run.elapsed == 1011
    use = dict(sections.time_use(run))
    assert list(use.values()) == [12, 2, 0.5, 25 - 14.5, 1011 - 25]
    assert summarise(run)["productive_share"] == pytest.approx(12 / 1011)
    assert run.resumed_at == [2]
    assert summarise(run)["step"] == 3
    assert layer_series(run, "moe/max_violation") is None


def test_missing_empty_and_damaged_files_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics at .*workdir of a run"):
        build_report(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="holds no records yet"):
        build_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":1,"time":0}\n')
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        build_report(tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_command_line(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "experiments.report", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    write_run(tmp_path, layers=None)
    good = run(f"--workdir={tmp_path}")
    assert good.returncode == 0, good.stderr
    assert str(tmp_path / "report.md") in good.stdout
    bad = run(f"--workdir={tmp_path / 'nowhere'}")
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: no metrics at")
    assert "Traceback" not in bad.stderr


def test_downsample_keeps_means_and_spikes():
    steps = np.arange(10_007)
    values = np.sin(steps / 500.0)
    values[[77, 5000]] = [9.0, -9.0]
    values[123] = np.nan
    buckets = plots.downsample(steps, values, limit=100)
    assert len(buckets.steps) == 100
    assert buckets.high.max() == 9.0 and buckets.low.min() == -9.0
    assert (np.diff(buckets.steps) > 0).all()
    # Buckets hold 100 or 101 points, so their plain mean is the mean to about 1 %.
    assert buckets.mean.mean() == pytest.approx(np.nanmean(values), abs=2e-3)
    short = plots.downsample(steps[:50], values[:50], limit=100)
    np.testing.assert_array_equal(short.mean, values[:50])


def test_smooth_is_a_centred_mean():
    values = np.array([1.0, 2.0, 6.0, 4.0])
    np.testing.assert_allclose(plots.smooth(values, 3), [1.5, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(plots.smooth(values, 1), values)


def test_sublayer_names():
    assert plots.sublayer_names(5, 2) == [
        "0 attn",
        "0 ffn",
        "1 attn",
        "1 ffn",
        "output",
    ]
    assert plots.sublayer_names(4, None)[-1] == "1 ffn"
    assert plots.sublayer_names(4, 3) == ["0", "1", "2", "3"]


def test_plots_of_a_deep_model(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(9), size=187)
    figure = plots.depth_map_figure(weights, num_layers=93)
    assert len(figure.axes[0].get_xticklabels()) < 60
    assert len(figure.axes[0].texts) == 0
    steps = np.arange(3000)
    series = plots.Series(steps, rng.random((3000, 92)))
    lines = plots.history_figure(
        [plots.Panel("MaxVio", "ratio", series)], range(1, 93), "layer"
    )
    drawn = lines.axes[0].get_lines()
    assert len(drawn) == 92
    assert max(len(line.get_xdata()) for line in drawn) == plots.MAX_POINTS
