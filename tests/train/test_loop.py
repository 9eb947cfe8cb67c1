"""A run from start to report: resuming is exact, and what goes wrong says so."""

import errno
import json
import os
import signal

import numpy as np
import pytest
from rich.console import Console

from kimi_jax import flops
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.train import checkpoint_files, loop, session, workdir
from kimi_jax.train.alarm import Alarmed
from kimi_jax.train.checkpoint_files import CheckpointError
from kimi_jax.train.nonfinite import NonFinite
from tests import tiny

# What a run does around its steps does not depend on the model, so it is one that
# compiles in seconds.
SMALL = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.residual.kind=none",
    "optimizer.kind=adamw",
)

# What is resumed has the moments of both optimizers.
MUON = "optimizer.kind=muon"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty short documents, so that a window of 32 bytes holds a few."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc \n"), 40)) for _ in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def run(corpus, tmp_path):
    """Trains with overrides in a workdir below `tmp_path`; returns the workdir."""

    def start(name="run", *overrides):
        cfg = tiny.make(f"data.sources={corpus}", *SMALL, *overrides)
        with open(os.devnull, "w") as quiet:
            loop.train(cfg, str(tmp_path / name), console=Console(file=quiet))
        return tmp_path / name

    return start


def stored(workdir):
    """Canonical arrays of the newest checkpoint."""
    folder = checkpoint_files.find(workdir)
    flat = checkpoint_files.read_arrays(folder, checkpoint_files.stored_arrays(folder))
    return {name: np.asarray(leaf) for name, leaf in flat.items()}


def interrupt_after(monkeypatch, step):
    """Ctrl-C while batch `step` is being read."""
    iterate = loader.iterate

    def interrupted(source, start, stop, **kwargs):
        for i, batch in enumerate(iterate(source, start, stop, **kwargs), start + 1):
            if isinstance(source, loader.Reader) and i == step:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    monkeypatch.setattr(loader, "iterate", interrupted)


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_same_bits(run, monkeypatch):
    whole = run("whole", MUON)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(session.Interrupted, match="SIGINT after step 3") as caught:
            run("parts", MUON)
    assert caught.value.exit_code == 130
    parts = run("parts", MUON)
    want, got = stored(whole), stored(parts)
    assert want.keys() == got.keys() and int(got["step"]) == 4
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)

    def losses(workdir):
        records = read_metrics(workdir / "metrics.jsonl")
        return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]

    assert losses(parts) == losses(whole) and len(losses(whole)) == 4
    for name in ("report.md", "summary.json", "sample.txt", "plots/loss.png"):
        assert (parts / name).stat().st_size > 0
    events = [r for r in read_metrics(parts / "metrics.jsonl") if r["kind"] == "run"]
    assert [(e["event"], e["step"]) for e in events] == [
        ("start", 0),
        ("resume", 3),
        ("end", 4),
    ]
    saves = [r for r in read_metrics(parts / "metrics.jsonl") if "bytes" in r]
    assert [r["step"] for r in saves] == [2, 3, 4]
    assert all(0 < r["blocking_seconds"] <= r["seconds"] for r in saves)
    # A finished run only makes its report again.
    run("parts", MUON)
    np.testing.assert_array_equal(
        stored(parts)["params/embedding/embed"],
        want["params/embedding/embed"],
    )


@pytest.mark.slow
def test_what_a_run_says_about_itself(run):
    watched = ("train.eval_length_multiples=1,2", "monitor.profile=2:4")
    workdir = run("run", *watched, "train.log_every=2")
    records = read_metrics(workdir / "metrics.jsonl")
    kinds = {(r["kind"], r["step"]) for r in records}
    assert kinds == {
        ("run", 0),
        *((kind, step) for step in (2, 4) for kind in ("train", "eval", "checkpoint")),
        ("run", 4),
    }
    train = [r for r in records if r["kind"] == "train"]
    seconds = [r["productive_seconds"] for r in train]
    assert seconds == pytest.approx(np.cumsum([2 * r["step_seconds"] for r in train]))
    cfg = tiny.make(*SMALL)
    for record in train:
        rate = record["flops_per_second"] * record["step_seconds"]
        assert rate == pytest.approx(flops.step_flops(cfg))
        assert 0 <= record["data_wait_share"] <= 1 and "mfu" not in record
        elapsed = record["time"] - records[0]["time"]
        share = record["productive_seconds"] / elapsed
        assert record["productive_share"] == pytest.approx(share, rel=0.05)
    (evaluation, _) = [r for r in records if r["kind"] == "eval"]
    assert list(evaluation["lengths"]) == ["32", "64"]
    assert evaluation["lengths"]["64"]["beyond_tokens"] > 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert list((workdir / "profile").rglob("perfetto_trace.json.gz"))
    text = (workdir / "report.md").read_text()
    assert "## Loss by position" in text and "## Speed" in text


@pytest.mark.slow
def test_a_run_may_move_to_another_mesh(run, monkeypatch):
    """Interrupted on one mesh and resumed on another: one device's run, to rounding."""
    whole = run("whole", MUON)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(session.Interrupted):
            run("moved", MUON)
    moved = run("moved", MUON, "mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2")
    want, got = stored(whole), stored(moved)
    assert want.keys() == got.keys() and int(got["step"]) == 4
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=2e-4, atol=2e-6, err_msg=name
        )


def test_a_workdir_belongs_to_one_run(run, tmp_path):
    workdir = run("run", "train.steps=1")
    before = sorted(p.name for p in workdir.iterdir())
    with pytest.raises(
        UserError, match=r"config.model.width: 16 in the workdir, 24 now"
    ):
        run("run", "train.steps=1", "model.width=24")
    assert sorted(p.name for p in workdir.iterdir()) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run("other")
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        run("file")


def test_an_update_that_overflows_is_not_applied(run, tmp_path):
    """Loss and gradient of step 1 are fine; its parameters would not be."""
    with pytest.raises(NonFinite, match=r"step 1 is not finite.*was not applied") as e:
        run("nan", "optimizer.learning_rate=1e30", "train.checkpoint_every=1")
    assert "It began in the optimizer's update of " in str(e.value)
    assert not any((tmp_path / "nan" / "checkpoints").iterdir())


def test_an_alert_can_stop_a_run_which_goes_on_when_asked_again(run, tmp_path):
    """Two of four experts are used: with the limit above that, entropy is low."""
    overrides = (
        "model.ffn.num_dense_layers=0",
        "model.moe.num_experts=8",
        "model.moe.balancing.method=none",
        "alerts.load_entropy=0.9999999",
        "alerts.stop=load_entropy",
        "train.checkpoint_every=4",
    )
    with pytest.raises(Alarmed, match=r"load entropy down to .*: layer 0"):
        run("alert", *overrides)
    workdir = tmp_path / "alert"
    assert int(stored(workdir)["step"]) == 1
    # The condition still holds after the resume: it is not news, and stops nothing.
    run("alert", *overrides)
    records = read_metrics(workdir / "metrics.jsonl")
    raised = [r for r in records if r.get("name") == "load_entropy"]
    assert [(r["kind"], r["step"]) for r in raised] == [("alert", 1)]
    assert (
        "| 1 | load_entropy | load entropy down" in (workdir / "report.md").read_text()
    )
    last = [r for r in records if r["kind"] == "train"][-1]
    assert last["step"] == 4 and last["loss_max"] == pytest.approx(last["loss"])
    assert 0 <= last["data_wait_share"] <= 1 and last["skipped"] == 0
    assert last["groups"]["update_rms/gqa"] > 0
    assert last["layers"]["moe/bias_update"] == [0.0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.sources=/does/not/exist",), "/does/not/exist"),
        (("model.vocab_size=100",), "tokenizer has 272 tokens"),
        (("mesh.data=64", "train.batch_size=64"), "data=64 on 8 cpu devices"),
        (("data.tokenizer=nowhere.json",), "no such file; write 'bytes'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    run, tmp_path, overrides, words
):
    with pytest.raises(UserError, match=words):
        run("bad", *overrides)
    assert not (tmp_path / "bad").exists()


def test_tokens_outlast_a_config_that_does_not_fit(run, tmp_path):
    """Tokens are made before the workdir is claimed, and are not made again."""
    with pytest.raises(UserError, match=r"lower config\.train\.batch_size"):
        run("run", "train.batch_size=4000")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["tokens"]
    made = tmp_path / "run" / "tokens" / "00" / "store.json"
    before = made.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"lower config\.train\.batch_size"):
        run("run", "train.batch_size=8000")
    assert made.stat().st_mtime_ns == before
    assert not workdir.check(tmp_path / "run", tiny.make())


def test_an_empty_corpus_is_refused(run, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(UserError, match=r"empty\.txt"):
        run("bad", f"data.sources={empty}")


def test_a_full_disk_keeps_the_last_checkpoint(run, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    save = ocp.CheckpointManager.save

    def full(self, step, *args, **kwargs):
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(CheckpointError, match="last whole one is step 2") as caught:
        run("full")
    assert "No space left on device" in str(caught.value)
    assert int(stored(tmp_path / "full")["step"]) == 2
