"""The report and the lines of a run of reinforcement learning."""

import io

from rich.console import Console

from kimi_jax.monitor import rl_sections
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import MetricsWriter
from kimi_jax.monitor.report import build_report
from kimi_jax.monitor.runs import load_run


def numbers(success, **more):
    return {
        "success": success,
        "by_difficulty": {"1": success, "10": success / 2, "2": success},
        "by_length": {"128": success},
        "truncated": {"tokens": 0.25, "turns": 0.0},
        **more,
    }


def write_run(workdir):
    with MetricsWriter(workdir) as writer:
        writer.write("run", 0, event="start", parameters=1000)
        writer.write("eval", 0, rl=numbers(0.1), seconds=1.0)
        for step in (2, 4, 6):
            rl = numbers(
                step / 10,
                iteration=step // 2,
                trajectories=12,
                policy_kl=0.01,
                rollout_seconds=3.0,
                learn_seconds=1.5,
            )
            writer.write("train", step, learning_rate=1e-3, gradient_norm=0.5, rl=rl)
        writer.write("eval", 4, rl=numbers(0.75), seconds=1.0)
        writer.write("eval", 6, rl=numbers(0.5), seconds=1.0)
        writer.write("run", 6, event="end")


def test_the_report_draws_success_health_and_time(tmp_path):
    write_run(tmp_path)
    text = build_report(tmp_path).read_text()
    assert "**Success 0.5000 on held-out tasks** after 6 steps, finished." in text
    for row in (
        "| success on held-out tasks, first | 0.1000 |",
        "| best | 0.7500 |",
        "| last | 0.5000 |",
        "| iterations | 3 |",
        "| trajectories | 36 |",
        "| seconds of learning | 4.5000 |",
    ):
        assert row in text
    for name in ("rl_success", "rl_health", "rl_time"):
        assert f"](plots/{name}.png)" in text
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 0
    run = load_run(tmp_path)
    # Difficulties in the order of numbers; one length alone is no panel.
    lines = rl_sections._lines(rl_sections._numbers(run.eval), "by_difficulty")
    assert list(lines) == ["1", "2", "10"] and lines["10"].values[1] == 0.375
    titles = [
        axis.get_title("left") for axis in rl_sections.draw_rl(run)["rl_success"].axes
    ]
    assert titles == [
        "Success",
        "Success by difficulty, held-out tasks",
        "Trajectories cut off, share by reason",
    ]


def test_lines_of_an_iteration_and_of_an_evaluation():
    printed = io.StringIO()
    with Progress(Console(file=printed, width=300), curve="success") as progress:
        rl = {"success": 0.25, "reward": 0.5, "policy_kl": 1e-3, "rollout_seconds": 2.0}
        progress.update({"kind": "train", "step": 2, "rl": rl}, 2, 40)
        progress.update({"kind": "eval", "step": 2, "rl": {"success": 0.125}}, 2, 40)
    train, held_out = printed.getvalue().splitlines()
    assert train.startswith("step  2/40  success 25.0%  reward  0.500  kl  1.0e-03")
    assert "rollout 2.0 s" in train and train.endswith("ETA   --:--")
    assert held_out == "eval  2/40  held-out success 12.5%"
