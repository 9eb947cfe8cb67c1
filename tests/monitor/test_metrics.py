"""The metrics file: exact values, whole lines, resume, failed writes, TensorBoard."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.monitor import metrics
from kimi_jax.monitor.metrics import MetricsWriter, read_metrics, to_jsonable


def write_steps(workdir, steps, resume_step=None):
    with MetricsWriter(workdir, resume_step) as writer:
        for step in steps:
            writer.write("train", step, loss=1.0 / step)


def test_records_come_back_as_written(tmp_path):
    layers = {
        "moe/max_violation": jnp.array([0.1, 0.2], jnp.float32),
        "residual/weights": np.array([[1.0, 0.0], [0.25, 0.75]]),
    }
    with MetricsWriter(tmp_path / "a" / "b") as writer:
        stored = writer.write(
            "train",
            np.int64(3),
            loss=jnp.float32(0.1),
            half=jnp.bfloat16(1.5),
            counts=np.arange(3),
            flag=np.bool_(True),
            where=tmp_path,
            nothing=None,
            layers=layers,
        )
    (record,) = read_metrics(tmp_path / "a" / "b" / "metrics.jsonl")
    assert record == stored
    assert (record["kind"], record["step"]) == ("train", 3)
    assert record["time"] > 1.6e9
    # float32 widened, not rounded to decimals.
    assert record["loss"] == float(np.float32(0.1)) != 0.1
    assert record["half"] == 1.5
    assert record["counts"] == [0, 1, 2]
    assert record["flag"] is True and record["nothing"] is None
    assert record["where"] == str(tmp_path)
    assert record["layers"]["residual/weights"] == [[1.0, 0.0], [0.25, 0.75]]
    assert record["layers"]["moe/max_violation"][1] == float(np.float32(0.2))


def test_non_finite_floats_are_strict_json_and_come_back(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0])
        writer.write("train", 1, loss=float("nan"), values=values)
        with pytest.raises(ValueError, match="reserved"):
            writer.write("train", 2, note="NaN")

    def refuse(constant):
        raise AssertionError(f"not strict JSON: {constant}")

    line = (tmp_path / "metrics.jsonl").read_text()
    parsed = json.loads(line, parse_constant=refuse)
    assert parsed["values"] == ["NaN", "Infinity", "-Infinity", 1.0]
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"]) and math.isnan(record["values"][0])
    assert record["values"][1:] == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2.0}, np.array([1j]), np.array(["a"]), 1 + 2j, jax.random.key(0)],
    ids=["object", "key", "complex array", "text array", "complex", "prng key"],
)
def test_unsupported_values_are_named(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"train\.layers\.x"):
            writer.write("train", 1, layers={"x": value})
        writer.write("train", 2, loss=1.0)
    assert [r["step"] for r in read_metrics(writer.path)] == [2]


def test_bad_arguments(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=r"step must be an integer, got 1\.5"):
        writer.write("train", 1.5)
    with pytest.raises(ValueError, match="0 or more"):
        writer.write("train", -1)
    with pytest.raises(ValueError, match='"time" is set by the writer'):
        writer.write("train", 1, time=0.0)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write("train", 1)


def test_a_half_written_last_line_is_dropped(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    # Every possible cut inside the third line.
    for cut in range(second, len(whole)):
        path.write_bytes(whole[:cut])
        steps = [record["step"] for record in read_metrics(path)]
        assert steps == ([1, 2] if cut < len(whole) - 1 else [1, 2, 3])
    for tail in (b"\0\0\0\0", b"\xff\xfe", b'"text"', b'{"kind":"train"}'):
        path.write_bytes(whole + tail)
        assert len(read_metrics(path)) == 3


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl, line 2: not a metrics record"
    ):
        read_metrics(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path, resume_step=1)
    assert path.read_bytes() == before


def test_resume_removes_the_steps_that_are_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2, 3, 4, 5])
    head = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with open(path, "ab") as file:
        file.write(b'{"kind":"train","step":6,')
    write_steps(tmp_path, [4, 5], resume_step=3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    # Kept records are kept to the byte.
    assert path.read_bytes().startswith(head)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "metrics.jsonl"
    ]


def test_resume_completes_a_line_that_only_lacks_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(tmp_path, [3], resume_step=2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_resume_without_a_file_and_from_zero(tmp_path):
    write_steps(tmp_path, [1, 2], resume_step=0)
    write_steps(tmp_path, [1], resume_step=0)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_fresh_run_does_not_touch_another_run(tmp_path):
    write_steps(tmp_path, [1])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already holds the records of a run"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics at"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_the_fix(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(OSError, match="free some space") as error:
        writer.write("train", 1, loss=1.0)
    assert error.value.errno == errno.ENOSPC
    assert str(tmp_path / "metrics.jsonl") in str(error.value)


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path):
    # A file size limit cuts the line like a disk that fills up in the middle of it.
    writer = MetricsWriter(tmp_path)
    writer.write("train", 1, loss=1.0)
    whole = writer.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            writer.write("train", 2, loss=1.0)
        with pytest.raises(OSError, match=r"other\.json"):
            metrics.replace_file(tmp_path / "other.json", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert writer.path.read_bytes() == whole
    files = sorted(p.name for p in tmp_path.iterdir() if p.is_file())
    assert files == ["metrics.jsonl"]
    writer.write("train", 2, loss=1.0)
    assert [record["step"] for record in read_metrics(writer.path)] == [1, 2]


def test_a_killed_process_loses_nothing_that_it_wrote(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from kimi_jax.monitor.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for step in range(5): writer.write('train', step, loss=1.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, env=env
    )
    assert done.returncode == -signal.SIGKILL
    steps = [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4]


def test_to_jsonable_leaves_its_input_alone():
    value = {"a": [1, (2.0, None)], "b": "text"}
    assert to_jsonable(value) == {"a": [1, [2.0, None]], "b": "text"}
    assert value["a"][1] == (2.0, None)
