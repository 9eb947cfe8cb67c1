"""What --collect makes of runs whose numbers are known."""

import csv
import io
import runpy

import numpy as np
import pytest

from kimi_jax import accounting, flops
from kimi_jax.errors import UserError
from kimi_jax.monitor import plots
from kimi_jax.monitor.metrics import MetricsWriter
from kimi_jax.sweep import emit, figures, ladder, table
from kimi_jax.sweep.settings import make_settings
from tests import tiny
from tests.test_launch import LAUNCH, OPTIONS

LOSS = {"none": 3.0, "block_attention": 2.9}


def load(argument):
    values = tiny.values()
    values.train.steps = int(argument or 4)
    return values


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Losses 0.01 above or below a power law of compute, by seed; one unfinished."""
    root = tmp_path_factory.mktemp("sweep")
    hyper = [
        {"model.residual.kind": kind, "arg": steps, "train.seed": seed}
        for kind in LOSS
        for steps in ("4", "16", "64", "256")
        for seed in (0, 1)
    ]
    found = []
    for number, setting in enumerate(make_settings(hyper, load)):
        steps = setting.config.train.steps
        spent = steps * flops.step_flops(setting.config)
        loss = LOSS[setting.overrides["model.residual.kind"]] * (spent / 1e8) ** -0.05
        loss += 0.01 * (1 - 2 * setting.config.train.seed)
        with MetricsWriter(root / setting.id) as metrics:
            values = {
                "layers": {
                    "residual/rms": [1.0, 2.0 + setting.config.train.seed],
                    "moe/max_violation": [0.5, 0.25 + setting.config.train.seed],
                },
                "groups": {"update_head_spread/kda": 1.5, "update_rms/kda": 9.0},
            }
            metrics.write("train", steps, loss=loss, tokens=steps * 128, **values)
            values = {"loss": loss, "bits_per_byte": loss / np.log(2)}
            metrics.write("eval", steps // 2, **values)
            metrics.write("eval", steps, **values)
            if number < len(hyper) - 1:
                metrics.write("run", steps, event="end")
        found.append(table.read(setting, root / setting.id))
    assert table.read(setting, root / "none") is None
    return found


def test_a_group_has_mean_and_deviation_over_its_seeds(results):
    groups = table.group(results)
    assert len(groups) == 8 and groups[0].label == "4 kind=none"
    assert [len(group.results) for group in groups] == [2] * 7 + [1]
    first = groups[0].values("validation_loss")
    page = table.to_markdown("x", groups, {"a: b|c": "stopped"}, ["final"], ["note"])
    # Two numbers 0.02 apart deviate by 0.02 / sqrt 2 from their mean.
    assert first.std(ddof=1) == pytest.approx(0.02 / np.sqrt(2))
    assert f"| 4 kind=none | 2 | {first.mean():.4f} ± 0.0141 |" in page
    assert "2.50 ± 0.71 | 1.50 ± 0.00 |" in page
    assert "dead experts" not in page and "![final](plots/final.png)" in page
    assert "| a: b\\|c | stopped |" in page and "\n\nnote\n\n" in page
    assert table.spread(np.array([]), "{:.2f}") == "-"
    assert table.spread(np.array([1.5]), "{:.2f}") == "1.50"


def test_the_csv_has_a_row_for_each_run(results):
    rows = list(csv.DictReader(io.StringIO(table.to_csv(results))))
    assert len(rows) == 16 and rows[-1]["finished"] == "false"
    for row, result in zip(rows, results, strict=True):
        assert row["id"] == result.setting.id
        assert row["model.residual.kind"] == result.setting.swept["model.residual.kind"]
        assert float(row["validation_loss"]) == result.summary["validation_loss"]
        assert float(row["flops"]) == result.flops


def test_a_ladder_has_a_law_for_each_line_and_a_multiplier(results):
    climbed = ladder.climb(table.group(results), ("arg",), "power")
    assert list(climbed.laws) == ["kind=none", "kind=block_attention"]
    # The noise is the same on both lines, save for the run that is not finished.
    for law in climbed.laws.values():
        assert law.exponent == pytest.approx(0.05, rel=0.05)
    base, other = climbed.points.values()
    assert len(base[0]) == 8 and len(other[0]) == 7
    gain = ladder.multipliers(climbed.laws, "kind=none", 1e9)["kind=block_attention"]
    assert gain.low < (3.0 / 2.9) ** (1 / 0.05) < gain.high
    heading, rows, text = ladder.notes(climbed)
    assert heading == "## Scaling" and "| kind=none | 8 |" in rows and "FLOPs" in text
    assert ladder.climb([], ("arg",), "power").points == {}
    few = ladder.climb(table.group(results[:2]), ("arg",), "offset")
    assert "No law for *kind=none*: 2 runs at 1 computes" in ladder.notes(few)[-1]


def test_figures_show_every_run(results, tmp_path):
    groups = table.group(results)
    drawn = figures.draw(groups)
    assert list(drawn) == ["final", "curves", "depth"] and figures.draw([]) == {}
    lines = drawn["depth"].axes[0].lines
    assert len(lines) == 8 and lines[0].get_ydata().tolist() == [1.0, 2.5]
    climbed = ladder.climb(groups, ("arg",), "power")
    drawn["scaling"] = figures.ladder(climbed.points, climbed.laws)
    dots = [len(line.get_xdata()) for line in drawn["scaling"].axes[0].lines]
    assert dots == [8, 100, 7, 100]
    for name, figure in drawn.items():
        plots.save_figure(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_a_sweep_over_balancing_shows_loads_over_steps(results):
    """The mean over seeds of the worst layer's: 0.5 and 1.25."""
    groups = [
        g._replace(swept={"model.moe.balancing.method": str(i)})
        for i, g in enumerate(table.group(results))
    ]
    drawn = figures.draw(groups)
    assert list(drawn) == ["final", "curves", "balance"]
    assert drawn["balance"].axes[0].lines[0].get_ydata().tolist() == [0.875]


def tasks():
    arguments = ["--config=configs/x.py:a", "--config.name=it's", "--workdir=runs/1"]
    return [emit.Task(emit.job_name("My_run", "ab12"), "seed=1", arguments)]


@pytest.mark.parametrize("kind", ["slurm", "xpk", "jobset"])
def test_a_script_has_a_launcher_for_each_run(kind):
    options = [o for o in OPTIONS[kind] if not o.startswith("--name")]
    text = emit.script(kind, tasks(), options, LAUNCH)
    assert text.startswith("#!/usr/bin/env bash\nset -euo pipefail\n\n# seed=1\n")
    assert f"{LAUNCH}/{kind}.sh --name=my-run-ab12 " in text
    assert """ -- --config=configs/x.py:a '--config.name=it'"'"'s' """ in text


def test_a_script_for_this_machine_has_the_commands_alone():
    text = emit.script("shell", tasks(), [], LAUNCH)
    assert "\npython -m experiments.train --config=configs/x.py:a " in text
    with pytest.raises(UserError, match="takes no options"):
        emit.script("shell", tasks(), ["--nodes=1"], LAUNCH)
    with pytest.raises(UserError, match="choose one of shell, jobset, sky"):
        emit.script("pbs", tasks(), [], LAUNCH)
    with pytest.raises(UserError, match=r"--cluster=\.\.\. is missing") as caught:
        emit.script("xpk", tasks(), [], LAUNCH)
    assert "--launch='--NAME=VALUE ...'" in str(caught.value)


@pytest.mark.parametrize("arg", ["", "gpu"])
def test_the_rungs_of_the_ladder_grow_and_share_their_tokens(arg):
    module = runpy.run_path("configs/ladder.py")
    hyper = module["get_hyper"](*filter(None, [arg]))
    settings = make_settings(hyper, module["get_config"])
    tokens = {}
    for setting in settings:
        train = setting.config.train
        seen = train.steps * train.batch_size * train.seq_len
        tokens.setdefault(setting.argument, set()).add(seen)
        near = module["active_parameters"](module["get_config"](setting.argument).model)
        assert seen == pytest.approx((20 if arg else 2) * near, rel=0.01)
    assert all(len(seen) == 1 for seen in tokens.values())
    first = settings[0]
    parts = accounting.parameter_parts(first.config.model)
    near = module["active_parameters"](module["get_config"](first.argument).model)
    # Norms, convolutions and residual queries weigh in the smallest models.
    active = sum(part.active for part in parts)
    assert near == pytest.approx(active, rel=0.02 if arg else 0.15)
    spent = [s.config.train.steps * flops.step_flops(s.config) for s in settings[::2]]
    rungs = len(spent) // 2
    assert (np.diff(spent[:rungs]) > 0).all() and (np.diff(spent[rungs:]) > 0).all()
    assert settings[0].config.model.residual.kind == "none"


def test_without_division_the_ladder_is_the_dial():
    ladder_model = runpy.run_path("configs/ladder.py")["get_config"](
        "depth=6,length=8192,per_parameter=20,divide=1"
    ).model
    dial = runpy.run_path("configs/k3_dial.py")["get_config"]("depth=6").model
    assert ladder_model.to_dict() == dial.to_dict()
