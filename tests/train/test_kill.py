"""Kill -9, twenty times in a row: no run is lost and not one bit is different.

Each life of the run is a process of its own, forked from a server that has imported
everything and started nothing; all share one compilation cache.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import MetricsWriter, read_metrics
from kimi_jax.train import checkpoint_files as files
from kimi_jax.train import loop, workdir
from tests import tiny

STEPS, KILLS = 60, 20
SMALL = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.residual.kind=none",
    f"train.steps={STEPS}",
    "train.checkpoint_every=2",
    f"train.eval_every={STEPS}",
    "optimizer.kind=adamw",
)


def live(root, name, prepare=None):
    """One life: train to the end, after `prepare`; exits as the command would."""
    jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if prepare is not None:
        prepare()
    cfg = tiny.make(f"data.sources={root / 'text.txt'}", *SMALL)
    with open(root / f"{name}.log", "a") as log:
        try:
            loop.train(cfg, str(root / name), console=Console(file=log, width=200))
        except UserError as error:
            print(error, file=log)
            raise SystemExit(getattr(error, "exit_code", 1)) from None


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_claim():
    def half(path, data):
        (path.parent / f".{path.name}.tmp").write_text(data[: len(data) // 2])
        die()

    workdir.replace_file = half


def die_after_claim():
    replace = workdir.replace_file
    workdir.replace_file = lambda *args: (replace(*args), die())


def die_before_sums():
    files.StateHandler.finalize = die


def die_before_commit():
    finalize = files.StateHandler.finalize
    files.StateHandler.finalize = lambda *args: (finalize(*args), die())


def wait_for_it():
    """However late the kill comes, it finds the run only a few steps on."""
    write, count = MetricsWriter.write, itertools.count(1)

    def leashed(self, kind, *args, **values):
        record = write(self, kind, *args, **values)
        if kind == "train" and next(count) == LEASH:
            time.sleep(60)
        return record

    MetricsWriter.write = leashed


def save_forever():
    files.StateHandler.finalize = lambda *_: time.sleep(60)


DOOMS = {
    "claim": die_in_claim,
    "claimed": die_after_claim,
    "first save": die_before_sums,
    "first commit": die_before_commit,
}
LEASH = 5  # steps; twice `checkpoint_every` and one


def starter(live):
    """start(root, name, prepare=None): a life of its own, forked for live(...)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([live.__module__])

    def start(root, name, prepare=None):
        process = context.Process(target=live, args=(root, name, prepare))
        process.start()
        return process

    return start


@pytest.fixture(scope="module")
def start():
    return starter(live)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("".join(rng.choice(list("abc \n"), 4000)))
    return folder


def saving(folder):
    """Whether a save is under way, seen from outside."""
    with contextlib.suppress(FileNotFoundError):
        return any("tmp" in name for name in os.listdir(folder / files.FOLDER))
    return False


def place(folder, said):
    """Where a life ended, from what it left behind and what it had said."""
    if saving(folder):
        return "save"
    phases = {"steps": "tok/s", "compile": "compiling", "start": ""}
    return next(phase for phase, words in phases.items() if words in said)


class Life:
    """A process at work, and what it has said so far."""

    def __init__(self, start, root, prepare=None, name="parts"):
        self._log, self.folder = root / f"{name}.log", root / name
        self._offset = self._log.stat().st_size if self._log.exists() else 0
        self.process, self._started = start(root, name, prepare), time.monotonic()

    def said(self):
        return self._log.read_text()[self._offset :] if self._log.exists() else ""

    def until(self, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.001)

    def ends(self):
        """Joins; returns (exit code, seconds it lived)."""
        self.process.join()
        return self.process.exitcode, time.monotonic() - self._started

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.ends()[0] == -signal.SIGKILL, self.said()
        return place(self.folder, self.said())


def kill_at_random(life, kind, rng, start_seconds, save_seconds):
    """Kill somewhere in a phase, which may turn out to be the next one."""
    if kind == "start":
        time.sleep(rng.uniform(0.0, start_seconds))
        return life.kill()
    life.until(lambda: "tok/s" in life.said())
    if kind == "save":
        life.until(lambda: "is durable" in life.said())
        life.until(lambda: saving(life.folder))
        save_seconds /= 2
    time.sleep(rng.uniform(0.0, save_seconds))
    return life.kill()


def arrays(workdir):
    folder = files.find(workdir)
    flat = files.read_arrays(folder, files.stored_arrays(folder))
    return {name: np.asarray(leaf) for name, leaf in flat.items()}


def losses(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


@pytest.mark.slow
def test_twenty_kills_change_no_bit(start, root, capsys):
    whole = start(root, "whole")
    whole.join()
    assert whole.exitcode == 0, (root / "whole.log").read_text()
    records = read_metrics(root / "whole" / "metrics.jsonl")
    pace = np.median([r["seconds"] for r in records if r["kind"] == "checkpoint"])
    landed, folder = [], root / "parts"
    for name, doom in DOOMS.items():
        life = Life(start, root, doom)
        code, start_seconds = life.ends()
        assert code == -signal.SIGKILL, life.said()
        landed.append((name, files.steps(folder)[-1:]))
    rng = np.random.default_rng(0)
    kinds = ["start"] * 6 + ["steps"] * 4 + ["save"] * 6
    for kind in rng.permutation(kinds):
        where = kill_at_random(
            Life(start, root, wait_for_it), kind, rng, start_seconds, pace
        )
        landed.append((where, files.steps(folder)[-1:]))
    last = Life(start, root)
    code, _ = last.ends()
    assert code == 0, last.said()
    with capsys.disabled():
        print("\nkilled in [last durable step]:", *(f"{p} {s}" for p, s in landed))

    assert len(landed) == KILLS
    assert sum("save" in where for where, _ in landed) >= 4
    want, got = arrays(root / "whole"), arrays(folder)
    assert want.keys() == got.keys() and int(got["step"]) == STEPS
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert losses(folder) == losses(root / "whole") and len(losses(folder)) == STEPS
    assert files.steps(folder) == [STEPS - 2, STEPS]
    assert len(os.listdir(folder / files.FOLDER)) == 2  # nothing half-made is left


@pytest.mark.slow
def test_sigterm_saves_and_says_so_by_its_code(start, root):
    def stepping(prepare=None):
        life = Life(start, root, prepare, name="term")
        life.until(lambda: "tok/s" in life.said())
        os.kill(life.process.pid, signal.SIGTERM)
        return life

    life = stepping(save_forever)
    life.until(lambda: saving(life.folder))
    life.process.join(0.5)
    assert life.process.is_alive()
    os.kill(life.process.pid, signal.SIGTERM)  # a second one does not wait
    assert life.ends()[0] == -signal.SIGTERM
    life = stepping()
    assert life.ends()[0] == 128 + signal.SIGTERM, life.said()
    step = files.steps(life.folder)[-1]
    assert f"stopped by SIGTERM after step {step}, which is saved" in life.said()
    assert losses(life.folder)[-1][0] == step
