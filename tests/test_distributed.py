"""Two real processes with four devices each: they start, agree, and fail clearly."""

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from kimi_jax import distributed
from kimi_jax.errors import UserError
from kimi_jax.train import workdir
from tests import tiny
from tests.ports import free_port

PROGRAM = """
import os
import pathlib
import signal
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from kimi_jax import distributed
from kimi_jax.errors import UserError
from kimi_jax.train import batch, loop, workdir
from tests import tiny

port, process, scratch = sys.argv[1:]
asked = {"coordinator": f"localhost:{port}", "processes": 2, "process": process}
cluster = tiny.make(*(f"cluster.{k}={v}" for k, v in asked.items())).cluster
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
place = distributed.start(cluster)
signal.raise_signal(signal.SIGTERM)
assert heard == ["SIGTERM"]
assert jax.process_count() == 2 and jax.process_index() == place.process
assert len(jax.local_devices()) == 4 and len(jax.devices()) == 8
leader = distributed.is_leader()

# What the other passes does not matter, not even its size.
news = {"step": 2**40 + 1, "why": "é" * 2000, "none": [None, 0.5]}
assert distributed.broadcast(news if leader else "mine") == news
assert distributed.gather("x" * place.process) == ["", "x"]
assert distributed.gather(2**40 + place.process) == [2**40, 2**40 + 1]
assert distributed.on_leader("sum", lambda: 40 + place.process, timeout=60) == 40

def refuse():
    raise UserError(f"process {place.process} refuses")

try:
    distributed.on_leader("refuse", refuse, timeout=60)
except UserError as error:
    assert str(error) == "process 0 refuses"


def lose():
    raise OSError(28, "No space left on device", f"file of {place.process}")

for ask, words in (
    (lambda: distributed.on_leader("lose", lose, timeout=60), "file of 0: No space"),
    (lambda: distributed.on_all("reading", lose), "reading failed in 2 of 2 processes"),
):
    try:
        ask()
        raise AssertionError("not refused")
    except UserError as error:
        assert words in str(error), error

# A run that the processes cannot do together.
folder = pathlib.Path(scratch)
own = str(place.process)
(folder / own).mkdir()
(folder / own / "other").write_text("abcd efgh " * (200 + place.process))
(folder / own / "same").write_text("abcd efgh " * 200)
os.chdir(folder / own)  # the file of that name on this host

def prepare(sources, name):
    cfg = tiny.make(f"data.sources={sources}")
    if name.startswith("own"):
        workdir.claim(folder / name, cfg)  # each host has a run there by itself
    return loop._prepare(cfg, folder / name, Console(quiet=True))

for sources, name, words in (
    ("same", f"run_{own}", "run_1 is not the folder that process 0 writes; name"),
    ("other", f"own_{own}", "the text differs from that of process 0: "),
    ("missing", "run", "missing"),
):
    try:
        prepare(sources, name)
        raise AssertionError("not refused")
    except UserError as error:
        assert words in str(error), error
        if words != "missing":
            assert "reading the text failed in 1 of 2 processes; in process 1" in str(
                error
            )
assert not prepare("same", "both")[1]

first = distributed.largest(0 if leader else 15)
second = distributed.largest(2 if leader else 0)
assert (int(first), int(second)) == (15, 2)

host = {name: np.arange(96, dtype=np.int32).reshape(8, 12)
        for name in ("tokens", "targets", "segment_ids", "weights")}
devices = np.array(jax.devices())
for shape, names, rows, share in (
    ((8,), ("data",), P("data"), (place.process, 2)),
    ((4, 2), ("data", "context"), P(("data",), "context"), (place.process, 2)),
    ((2, 4), ("context", "data"), P("data", "context"), (0, 1)),
    ((8,), ("context",), P(None, None), (0, 1)),
):
    rows = NamedSharding(Mesh(devices.reshape(shape), names), rows)
    found = batch.share_of_rows(rows, 8)
    assert found == share, (names, found)
    size = 8 // found.readers
    mine = {k: x[size * found.reader :][:size] for k, x in host.items()}
    for part in (batch.on_mesh(mine, rows, found), batch.on_mesh(host, rows)):
        x_BT = part.tokens_BT
        assert x_BT.shape == (8, 12) and x_BT.sharding == rows
        for shard in x_BT.addressable_shards:
            np.testing.assert_array_equal(shard.data, host["tokens"][shard.index])
# Every other device of a row axis is the other process's.
mixed = devices.reshape(2, 4).T.reshape(8)
try:
    batch.share_of_rows(NamedSharding(Mesh(mixed, ("data",)), P("data")), 8)
    raise AssertionError("not refused")
except UserError as error:
    assert "hold rows that are apart" in str(error), error

for _ in range(2):
    distributed.barrier("both", 60)
if leader:
    try:
        distributed.barrier("alone", 1)
        raise AssertionError("not refused")
    except UserError as error:
        print(error)
distributed.barrier("end", 60)
print("done")
"""


def processes(
    program: str, count: int, devices: int, scratch: pathlib.Path
) -> list[subprocess.Popen[str]]:
    """`count` of them; arguments: the port, their number, a folder that they share."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
    }
    port = str(free_port())
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(program),
                port,
                str(process),
                scratch,
            ],
            cwd=pathlib.Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]


def test_two_processes_start_agree_and_end(tmp_path):
    running = processes(PROGRAM, 2, 4, tmp_path)
    for process, one in enumerate(running):
        out, err = one.communicate(timeout=120)
        assert one.returncode == 0 and out.endswith("done\n"), err
        assert f"config.cluster: process {process} of 2, coordinator localhost" in out
        assert "waiting for the others, at most 1800 s" in out
        late = "not all processes came to 'alone' within 1 s: see the logs"
        assert (late in out) == (process == 0)


def start(*overrides: str, said: list[str] | None = None):
    cluster = tiny.make(*(f"cluster.{item}" for item in overrides)).cluster
    return distributed.start(cluster, ([] if said is None else said).append)


def test_a_process_that_never_comes():
    port, said = free_port(), []
    asked = ("processes=2", "process=0", f"coordinator=localhost:{port}", "timeout=1")
    with pytest.raises(UserError) as caught:
        start(*asked, said=said)
    for words in (
        f"process 0 of 2 waited 1 s at localhost:{port}: process 1 did not come",
        "Is one not started (start the command once for each process",
        "firewall",
        "--config.cluster.timeout=SECONDS waits longer",
    ):
        assert words in str(caught.value)
    (line,) = said
    assert f"coordinator localhost, port {port}; waiting for the others" in line


def test_a_run_may_be_resumed_by_another_cluster(tmp_path):
    workdir.claim(tmp_path, tiny.make())
    asked = ("cluster.processes=2", "cluster.process=0", "cluster.coordinator=a:1")
    assert workdir.check(tmp_path, tiny.make(*asked))


def test_alone_everything_is_the_plain_value():
    assert start() is None
    assert distributed.is_leader() and jax.process_count() == 1
    value = {"a": (1, 2)}
    assert distributed.broadcast(value) is value
    assert distributed.gather(value) == [value]
    assert distributed.on_leader("x", lambda: value, timeout=1) is value
    assert distributed.largest(7) == np.int32(7)
    distributed.barrier("nobody", 1)
