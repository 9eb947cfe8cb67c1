"""What TensorBoard and Prometheus get to see of the records."""

import json
import math
import pathlib
import re
import socket
import sys
import types
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.monitor import prometheus, tensorboard
from kimi_jax.monitor.metrics import MetricsWriter, read_metrics

DASHBOARD = pathlib.Path("docs/grafana_dashboard.json")

TRAIN = {
    "loss": 1.5,
    "bits_per_byte": 2.16,
    "learning_rate": 1e-3,
    "gradient_norm": 0.5,
    "tokens": 4096,
    "tokens_per_second": 2000.0,
    "flops_per_second": 1e9,
    "mfu": 0.4,
    "step_seconds": 0.25,
    "data_wait_share": 0.01,
    "productive_seconds": 30.0,
    "productive_share": 0.8,
    "name": "text is no metric",
    "groups": {"gradient_rms/kda": 0.5, "update_rms/kda": 0.25},
    "layers": {
        "moe/layer_index": [1, 2],
        "moe/max_violation": [0.5, 1.5],
        "moe/load_entropy": [0.9, 0.8],
        "moe/dead_experts": [0, 3],
        "moe/bias_range": [0.1, 0.2],
        "residual/entropy": [0.0, 0.5, 0.75],
        "residual/weights": [[1.0, 0.0], [0.5, 0.5]],
    },
}
EVAL = {
    "loss": 1.25,
    "bits_per_byte": 1.8,
    "tokens": 100,
    "seconds": 2.0,
    "lengths": {
        "32": {
            "loss": 1.25,
            "bits_per_byte": 1.8,
            "tokens": 100,
            "position_loss": {"1": 3.0, "32": 1.0},
            "position_tokens": {"1": 4, "32": 96},
        }
    },
}


def write(workdir, **options):
    with MetricsWriter(workdir, **options) as writer:
        writer.write("run", 4, event="resume", parameters=10)
        writer.write("train", 5, **TRAIN)
        writer.write("eval", 5, **EVAL)
        writer.write("checkpoint", 5, seconds=3.0, blocking_seconds=0.5)


class FakeSummaryWriter:
    def __init__(self, directory, purge_step):
        self.directory, self.purge_step, self.seen = directory, purge_step, {}
        FakeSummaryWriter.instances.append(self)

    def add_scalar(self, tag, value, step, walltime):
        assert walltime > 0 and step == 5 and tag not in self.seen
        self.seen[tag] = value

    def add_histogram(self, tag, values, step, walltime):
        self.add_scalar(tag, list(values), step, walltime)

    def flush(self):
        pass

    def close(self):
        self.seen["closed"] = True


def test_tensorboard_mirrors_records_when_it_is_installed(tmp_path, monkeypatch):
    FakeSummaryWriter.instances = []
    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = FakeSummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr(tensorboard, "tensorboard_available", lambda: True)
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.write("run", 4, event="resume", parameters=10)
        assert FakeSummaryWriter.instances == []
        layers = {"moe/layer_index": [1, 2], "moe/load": [1.0, math.inf]}
        writer.write("train", 5, loss=jnp.float32(1.5), layers=layers, name="a")
        writer.write("eval", 5, **EVAL, ok=True)
    (board,) = FakeSummaryWriter.instances
    assert board.directory == str(tmp_path / "tensorboard")
    assert board.purge_step == 5
    assert board.seen == {
        "train/loss": 1.5,
        "train/moe/load": [1.0],
        "train/moe/load/max": math.inf,
        "train/moe/load/mean": math.inf,
        "eval/loss": 1.25,
        "eval/bits_per_byte": 1.8,
        "eval/tokens": 100,
        "eval/seconds": 2.0,
        "eval/lengths/32/loss": 1.25,
        "eval/lengths/32/bits_per_byte": 1.8,
        "eval/lengths/32/tokens": 100,
        "eval/lengths/32/position_loss/1": 3.0,
        "eval/lengths/32/position_loss/32": 1.0,
        "eval/lengths/32/position_tokens/1": 4,
        "eval/lengths/32/position_tokens/32": 96,
        "closed": True,
    }


def test_without_tensorboard_nothing_is_mirrored(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(tensorboard, "tensorboard_available", lambda: False)
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def read_events(file: pathlib.Path) -> dict:
    """{tag: (step, scalar or (smallest, largest, count) of a histogram)}."""
    from tensorboardX.proto import event_pb2

    data, values = file.read_bytes(), {}
    while data:
        # A record: length, its checksum, the message, its checksum.
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            if value.HasField("histo"):
                shape = value.histo
                values[value.tag] = event.step, (shape.min, shape.max, shape.num)
            else:
                values[value.tag] = event.step, value.simple_value
    return values


def test_the_real_tensorboard_writer(tmp_path):
    pytest.importorskip("tensorboardX")
    assert tensorboard.tensorboard_available()
    write(tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = read_events(file)
    assert values["train/loss"] == (5, 1.5)
    assert values["train/gradient_rms/kda"] == (5, 0.5)
    assert values["train/moe/max_violation"] == (5, (0.5, 1.5, 2))
    assert values["train/moe/max_violation/max"] == (5, 1.5)
    assert values["train/moe/max_violation/mean"] == (5, 1.0)
    assert values["eval/lengths/32/position_loss/1"] == (5, 3.0)
    assert values["checkpoint/blocking_seconds"] == (5, 0.5)
    assert not any("weights" in tag or "layer_index" in tag for tag in values)


def latest(workdir) -> dict:
    records = read_metrics(workdir / "metrics.jsonl")
    return {record["kind"]: record for record in records}


def test_names_and_labels_of_what_is_exported(tmp_path):
    write(tmp_path)
    got = {
        (s.name.removeprefix("kimi_jax_"), *s.labels.values()): s.value
        for s in prometheus.samples(latest(tmp_path))
    }
    assert got["train_loss",] == 1.5 and got["eval_loss",] == 1.25
    assert got["gradient_rms", "kda"] == 0.5
    assert got["moe_max_violation", "2"] == 1.5
    assert got["residual_entropy", "1"] == 0.5
    assert got["eval_length_loss", "32"] == 1.25
    assert got["eval_position_loss", "32", "1"] == 3.0
    assert got["checkpoint_blocking_seconds",] == 0.5
    assert (got["steps",], got["tokens",], got["productive_seconds",]) == (5, 4096, 30)
    names = {name for name, *_ in got}
    assert not names & {"train_name", "moe_layer_index", "residual_weights", "train_ok"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as page:
        return page.read().decode()


def test_a_scrape_sees_the_latest_records(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    with prometheus.Exporter(port) as exporter:
        assert "kimi_jax" not in scrape(port)
        write(tmp_path, mirrors=[exporter])
        exporter.write({"kind": "train", "step": 6, "time": 0.0, "loss": math.nan})
        lines = scrape(port).splitlines()
        assert "kimi_jax_train_loss NaN" in lines
        assert 'kimi_jax_eval_position_loss{length="32",upto="1"} 3.0' in lines
        assert "# TYPE kimi_jax_steps_total counter" in lines
        assert "kimi_jax_steps_total 6.0" in lines
        assert 'kimi_jax_records_total{kind="train"} 2.0' in lines
        with pytest.raises(UserError, match=f"prometheus_port={port}: cannot be ser"):
            prometheus.Exporter(port)
    # The port is free again.
    prometheus.Exporter(port).close()


def test_without_the_library_the_port_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match="pip install prometheus_client"):
        prometheus.Exporter(9100)


def test_every_metric_of_the_dashboard_is_exported(tmp_path):
    write(tmp_path)
    exported = {
        s.name + "_total" * (s.kind == "counter")
        for s in prometheus.samples(latest(tmp_path))
    } | {"kimi_jax_records_total"}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"kimi_jax_\w+", query)}
    assert len(used) >= 15
    assert used <= exported, used - exported


def test_numbers_survive_every_mirror_unchanged(tmp_path):
    seen = []
    mirror = types.SimpleNamespace(write=seen.append)
    write(tmp_path, mirrors=[mirror])
    assert seen == read_metrics(tmp_path / "metrics.jsonl")
    np.testing.assert_equal(seen[1]["layers"], TRAIN["layers"])
