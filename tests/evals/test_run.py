"""An evaluation by its command's own path: cells, resuming, reports, comparison."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kimi_jax import sharding
from kimi_jax.errors import UserError
from kimi_jax.evals import run
from kimi_jax.evals.cells import make_text, plan
from kimi_jax.evals.measure import Measure
from kimi_jax.evals.report import compare
from tests import tiny

SMALL = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.ffn.num_dense_layers=1",
    "model.residual.block_size=1",
    "evaluation.examples=3",
    "evaluation.batch_tokens=512",
    "evaluation.max_length=512",
)
GRID = "needle:length=160/192:depth=0/1:digits=2,permutations:length=20:items=3"


def make(*overrides: str):
    return tiny.make(*SMALL, *overrides)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    lines = (json.dumps({"text": f"Line {i} of some text. " * 9}) for i in range(20))
    path.write_text("\n".join(lines))
    return path


def evaluate(tasks, folder, *overrides, checkpoint=run.FRESH):
    with open(os.devnull, "w") as quiet:
        cfg = make(*overrides)
        return run.evaluate(cfg, checkpoint, tasks, str(folder), Console(file=quiet))


@pytest.fixture(scope="module")
def evaluated(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations") / "first"
    text = f"data.sources={corpus}"
    path = evaluate(
        GRID + ",text:multiple=2", folder, text, "data.validation_fraction=0.5"
    )
    return folder, json.loads(path.read_text())


@pytest.mark.slow
def test_results_name_what_was_measured(evaluated) -> None:
    _, results = evaluated
    cells = {r["spec"]: r for r in results["results"]}
    assert len(cells) == 6 and results["weights"] == run.FRESH
    needle = cells["needle:length=160:depth=0.0:digits=2"]
    assert needle["family"] == "retrieval" and needle["examples"] == 3
    assert needle["dials"]["keys"] == 1  # what was not given is there too
    assert 0 <= needle["completed"] <= needle["accuracy"] <= 1
    assert len(needle["digest"]) == 16
    # An untrained model guesses: ln 272 nats a byte, or more where it is confident.
    assert needle["loss"] > 4
    text = cells["text:multiple=2:source=0"]
    assert text["length"] == 64 and text["bits_per_byte"] > 6
    assert max(map(int, text["position_loss"])) == 64


@pytest.mark.slow
def test_report_tells_families_apart(evaluated) -> None:
    folder, _ = evaluated
    report = (folder / "report.md").read_text()
    for title in ("Long context: retrieval", "State", "Language"):
        assert f"## {title}\n" in report
    drawn = {path.name for path in (folder / "plots").iterdir()}
    wanted = {"retrieval_length.png", "retrieval_depth_needle.png", "language_0.png"}
    assert wanted <= drawn
    assert all(f"plots/{name}" in report for name in drawn)


@pytest.mark.slow
def test_what_is_finished_is_not_measured_again(evaluated, corpus, monkeypatch) -> None:
    folder, results = evaluated
    overrides = (f"data.sources={corpus}", "data.validation_fraction=0.5")
    asked = []

    def refuse(self, cell, done=None):
        asked.append(cell.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(Measure, "__call__", refuse)
    path = evaluate(GRID, folder, *overrides)
    again = json.loads(path.read_text())
    by_spec = [sorted(r["results"], key=lambda c: c["spec"]) for r in (again, results)]
    assert not asked and by_spec[0] == by_spec[1]
    with pytest.raises(KeyboardInterrupt):
        evaluate(GRID + ",permutations:length=12:items=3", folder, *overrides)
    assert asked == ["permutations:length=12:items=3"]
    with pytest.raises(UserError, match=r"examples: 3 in the folder, 4 now"):
        evaluate(GRID, folder, *overrides, "evaluation.examples=4")


@pytest.mark.slow
def test_runs_are_compared_where_they_meet(evaluated, tmp_path) -> None:
    _, results = evaluated
    other = json.loads(json.dumps(results))
    other["results"] = [r for r in other["results"] if r["task"] == "needle"]
    other["results"][0] |= {"accuracy": 0.5, "digest": "another"}
    text = compare({"one": results, "two": other}, tmp_path / "compared")
    rows = [line for line in text.splitlines() if "| accuracy |" in line]
    assert len(rows) == 4 and "0.5000 *" in rows[0]
    found = {path.name for path in (tmp_path / "compared").iterdir()}
    assert found == {"compare.md", "compare.json", "compare.png"}
    other["results"] = other["results"][:0]
    with pytest.raises(UserError, match="no cell in common"):
        compare({"one": results, "two": other}, tmp_path)


@pytest.mark.slow
def test_speed_counts_what_a_cache_holds() -> None:
    cfg = make("model.gqa.num_kv_heads=2")
    cell = plan(cfg, "speed:length=20:rows=2:new_tokens=3", make_text(cfg))[0]
    variables = tiny.variables(cfg.model)
    record = Measure(cfg, variables, sharding.make_mesh(cfg), Path("unused"))(cell)
    assert record["prefill_tokens_per_second"] > 0
    assert record["decode_tokens_per_second"] > 0
    # 26 tokens are one page of 64; keys and values of 2 heads of 8 in float32.
    assert record["cache_bytes"] == 64 * 2 * 2 * 8 * 4
    assert record["state_bytes"] == 0 and record["dials"]["rows"] == 2


@pytest.mark.parametrize(
    ("tasks", "match"),
    [
        ("needel", "'needel' does not exist; did you mean 'needle'"),
        ("needle:length=1K", "1,024 tokens .* config.evaluation.max_length=512"),
        ("speed:length=1K", "--config.evaluation.max_length=1024"),
        ("permutations:items=6", "720 symbols"),
        ("text:multiple=0", "multiple=0 must be at least 1"),
        ("text:source=3", "config.data.sources has 1, counted from 0"),
        ("speed:rows=0", "rows=0 must be at least 1"),
        ("mqar:length=64,mqar:length=64", "named twice"),
    ],
)
def test_tasks_that_cannot_run_are_named_before_anything_runs(
    tasks, match, tmp_path
) -> None:
    folder = tmp_path / "evaluation"
    with pytest.raises(UserError, match=match):
        evaluate(tasks, folder)
    assert not folder.exists()


def test_all_problems_are_named_at_once() -> None:
    cfg = make("data.sources=task:mqar:pairs=2")
    with pytest.raises(UserError) as caught:
        plan(cfg, "text,needle:depth=3,mqar:pair=2", make_text(cfg))
    for part in ("generated tasks", "depth=3.0: from 0", "did you mean 'pairs'"):
        assert part in str(caught.value)


def test_text_is_read_at_multiples_of_the_training_length() -> None:
    cfg = make()
    cells = plan(cfg, "text,stack:length=9/30", make_text(cfg))
    assert [c.length for c in cells] == [32, 64, 128, 512, 9, 30]
    assert len({c.file for c in cells}) == 6


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [("none/such", "holds no checkpoint"), (run.FRESH, "not empty and holds no eval")],
)
def test_a_folder_of_something_else_is_left_alone(checkpoint, match, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=match):
        evaluate("stack:length=9", tmp_path, checkpoint=checkpoint)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_no_results_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"holds no results\.json; name the --workdir"):
        run.read_results(tmp_path)
