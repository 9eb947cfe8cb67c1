"""One run by several processes: the numbers of one process, whatever ends them.

whole   1 process x 8 devices            the reference
chain   2 processes x 4 devices, one killed by SIGKILL;    then
        2 x 4, one stopped by SIGTERM;   then
        1 x 8, to the end
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.train import checkpoint_files as files
from tests.ports import free_port

STEPS, DOOM = 8, 5
LIMIT = 130  # seconds that any run may take
SILENCE = 20  # seconds; 100 outside of this test
CONFIG = f"""
from tests import tiny

def get_config():
    config = tiny.values()
    config.model.update(num_layers=1, attention=("gqa",))
    config.model.residual.kind = "none"
    config.optimizer.kind = "adamw"
    config.mesh.update(data=2, fsdp=4)
    config.train.update(
        steps={STEPS}, batch_size=8, checkpoint_every=2, eval_every={STEPS}
    )
    return config
"""
# The command, with a signal to itself before step DOOM.
PROGRAM = f"""
import os, sys
from experiments import cli, train
from kimi_jax import distributed
from kimi_jax.train.nonfinite import GuardedStep

doom, number = sys.argv.pop(1).split(":")
distributed._SILENCE_SECONDS = {SILENCE}
take = GuardedStep.__call__

def doomed(self, step, *arguments):
    if step == int(doom):
        os.kill(os.getpid(), int(number))
    return take(self, step, *arguments)

GuardedStep.__call__ = doomed
cli.run(train.main, config=True, workdir=True)
"""


class Run:
    """The processes of one run in `workdir`, started together."""

    def __init__(self, root, name, processes, number=None):
        devices = 8 // processes
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
            "--xla_backend_optimization_level=0",
        }
        port, self.workdir = free_port(), root / name
        self._all = []
        for process in range(processes):
            doomed = number is not None and process == processes - 1
            command = [
                *(sys.executable, "-c", PROGRAM),
                f"{DOOM}:{int(number)}" if doomed else "0:0",
                f"--config={root / 'config.py'}",
                f"--workdir={self.workdir}",
                f"--config.data.sources={root / 'text.txt'}",
            ]
            if processes > 1:
                command += [
                    f"--config.cluster.coordinator=localhost:{port}",
                    f"--config.cluster.processes={processes}",
                    f"--config.cluster.process={process}",
                ]
            self._all.append(
                subprocess.Popen(
                    command,
                    cwd=pathlib.Path(__file__).parents[2],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def last_ends(self):
        self._all[-1].wait(LIMIT)

    def ends(self):
        """(exit code, what it said) of each; none outlives this."""
        try:
            said = [one.communicate(timeout=LIMIT)[0] for one in self._all]
        finally:
            for one in self._all:
                one.kill()
        return [(one.returncode, x) for one, x in zip(self._all, said, strict=True)]


def ended(run, code):
    """What each process said before all ended with `code`."""
    results = run.ends()
    assert {found for found, _ in results} == {code}, "\n".join(x for _, x in results)
    return [said for _, said in results]


def lines(workdir, kind="train"):
    records = read_metrics(workdir / "metrics.jsonl")
    return [record for record in records if record["kind"] == kind]


def figures(workdir):
    names = ("step", "loss", "bits_per_byte", "gradient_norm")
    return np.array([[record[name] for name in names] for record in lines(workdir)])


def arrays(workdir):
    folder = files.find(workdir)
    flat = files.read_arrays(folder, files.stored_arrays(folder))
    return {name: np.asarray(leaf) for name, leaf in flat.items()}


@pytest.mark.slow
def test_processes_come_and_go_and_the_numbers_stay(tmp_path, capsys):
    (tmp_path / "config.py").write_text(CONFIG)
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text("".join(rng.choice(list("abc \n"), 8000)))
    chain = Run(tmp_path, "chain", 2, signal.SIGKILL)
    chain.last_ends()
    started = time.monotonic()
    whole = Run(tmp_path, "whole", 1)  # meanwhile
    (code, said), (killed, _) = chain.ends()
    seconds = time.monotonic() - started
    assert seconds < 2 * SILENCE
    ended(whole, 0)
    assert killed == -signal.SIGKILL and code not in (0, -signal.SIGKILL), said
    assert "cannot go on" in said or "distributed service" in said
    first = files.steps(chain.workdir)[-1]
    assert first in (2, 4)
    saved = lines(chain.workdir, "checkpoint")
    assert saved[0]["step"] == 2 and saved[0]["bytes"] > 0
    stopped = Run(tmp_path, "chain", 2, signal.SIGTERM)
    for said in ended(stopped, 128 + signal.SIGTERM):
        assert f"stopped by SIGTERM after step {DOOM + 1}, which is saved" in said
    assert files.steps(chain.workdir)[-1] == DOOM + 1
    (said,) = ended(Run(tmp_path, "chain", 1), 0)
    assert "report: " in said and "is durable" in said

    want = figures(whole.workdir)
    assert want[:, 0].tolist() == list(range(1, STEPS + 1))
    state = arrays(whole.workdir)
    got = figures(chain.workdir)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    found = arrays(chain.workdir)
    assert found.keys() == state.keys()
    for name, leaf in state.items():
        np.testing.assert_allclose(
            found[name], leaf, rtol=1e-4, atol=1e-6, err_msg=name
        )
    for name in ("report.md", "sample.txt", "config.json"):
        assert (chain.workdir / name).stat().st_size > 0
    with capsys.disabled():
        print(f"SIGKILL: saved {first}, the other ended after {seconds:.1f} s: {code}")
