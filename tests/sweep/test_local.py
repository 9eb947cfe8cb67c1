"""The pool does each run once, stops cleanly, and says why a run failed."""

import io
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from kimi_jax.errors import UserError
from kimi_jax.monitor import runs
from kimi_jax.sweep import board, local, state
from kimi_jax.sweep.settings import make_settings
from kimi_jax.sweep.state import Progress
from tests import tiny

# Stands for a training run: the same files, and the same answer to Ctrl-C.
RUN = """
import json, pathlib, signal, sys, time
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text("{}")
file = open(folder / "metrics.jsonl", "a")
def write(kind, step, **values):
    record = {"kind": kind, "step": step, "time": time.time(), **values}
    print(json.dumps(record), file=file, flush=True)
def saved(*_):
    write("checkpoint", 1)
    print("error: stopped by SIGINT")
    raise SystemExit(130)
signal.signal(signal.SIGINT, saved)
write("train", 2, loss=1.5)
if what == "wait":
    time.sleep(60)
if what == "fail":
    print("error: step 3 is not finite: layer 7\\n  and more\\n")
    raise SystemExit(1)
if what == "die":
    signal.raise_signal(signal.SIGKILL)
write("eval", 4, bits_per_byte=2.25)
write("run", 4, event="end")
"""


def job(root, name, what="finish"):
    command = [sys.executable, "-ISc", RUN, str(root / name), what]
    return local.Job(name, f"what={what}", command, steps=4, work=1.0)


def pool(root, workers=2, watch=lambda job, now: None):
    return local.Pool(root, state.Index(root), workers, watch)


def statuses(root, names):
    index = state.Index(root)
    return {name: state.look(root / name, index.failure(name)) for name in names}


def test_runs_finish_fail_and_die_and_say_so(tmp_path):
    seen = []
    jobs = [job(tmp_path, what, what) for what in ("finish", "fail", "die")]
    started = time.monotonic()
    assert (
        pool(tmp_path, 2, lambda job, now: seen.append((job.id, now.status))).run(jobs)
        is None
    )
    # What a sweep adds to a run: far below two seconds.
    assert time.monotonic() - started < 3 * 2
    found = statuses(tmp_path, ("finish", "fail", "die", "never"))
    assert found["finish"] == Progress("finished", 4, 1.5, 2.25)
    assert found["fail"].status == "failed"
    assert found["fail"].reason == "exit code 1: step 3 is not finite: layer 7"
    assert found["die"].reason.startswith("killed by SIGKILL, perhaps for its use")
    assert found["never"] == Progress("new")
    assert {("finish", "finished"), ("fail", "failed"), ("die", "failed")} <= {*seen}
    # What has been mended is no failure any more.
    pool(tmp_path).run([job(tmp_path, "fail")])
    assert statuses(tmp_path, ["fail"])["fail"].status == "finished"


def test_the_first_signal_lets_the_runs_save_and_starts_no_other(tmp_path):
    pause = threading.Event()

    def interrupt():
        pause.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    def watch(job, now):
        if now.step == 2:
            pause.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    jobs = [job(tmp_path, name, "wait") for name in ("a", "b")]
    assert pool(tmp_path, 1, watch).run(jobs) == signal.SIGINT
    thread.join()
    found = statuses(tmp_path, ("a", "b"))
    assert found["a"].status == "stopped" and found["b"].status == "new"
    assert '"checkpoint"' in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_one_sweep_at_a_time(tmp_path):
    def second(job, now):
        if now.status == "running":
            with pytest.raises(UserError, match="is at work in"):
                pool(tmp_path).run([])
            caught.append(job)

    caught = []
    pool(tmp_path, 1, second).run([job(tmp_path, "a")])
    assert caught
    pool(tmp_path).run([])


def test_runs_share_what_they_compile_until_the_sweep_ends(tmp_path, monkeypatch):
    note = (
        "import os, pathlib, sys; "
        "cache = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR']); "
        "cache.mkdir(parents=True, exist_ok=True); "
        "print(cache, len([*cache.iterdir()]), file=open(sys.argv[1], 'w')); "
        "(cache / 'program').write_text('')"
    )

    said = {name: str(tmp_path / f"{name}.txt") for name in ("first", "second")}

    def notes():
        jobs = [
            local.Job(name, name, [sys.executable, "-Ic", note, said[name]], 1, 1.0)
            for name in said
        ]
        pool(tmp_path, 1).run(jobs)
        return [pathlib.Path(path).read_text().split() for path in said.values()]

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    mine = tmp_path / local.COMPILED
    # A sweep that was killed has left something of another machine.
    mine.mkdir()
    (mine / "old").write_text("")
    assert notes() == [[str(mine), "0"], [str(mine), "1"]]
    assert not mine.exists()
    # A folder that the user has named is used, and stays.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "ours"))
    assert notes() == [[str(tmp_path / "ours"), "0"], [str(tmp_path / "ours"), "1"]]
    assert (tmp_path / "ours" / "program").exists()


def test_the_eta_weighs_runs_by_their_work(tmp_path):
    short, long = job(tmp_path, "a"), job(tmp_path, "b")._replace(work=3.0)
    runs = pool(tmp_path, 1)
    etas = []

    def watch(job, now):
        if job.id == "a" and now.status == "finished":
            etas.append((runs.eta(), runs._busy_seconds))

    runs._watch = watch
    runs.run([short, long])
    ((eta, seconds),) = etas
    assert eta == pytest.approx(3 * seconds) and runs.eta() == 0.0


def test_gpus_are_dealt_out_to_the_workers():
    def devices(workers, gpus):
        found = local.environments(workers, {"A": "1"}, gpus)
        assert all(own["A"] == "1" for own in found)
        return [own.get("CUDA_VISIBLE_DEVICES") for own in found]

    assert devices(2, []) == [None, None]
    assert devices(2, list("0123")) == ["0,2", "1,3"]
    assert devices(3, list("01")) == ["0", "1", "0"]
    memory = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert memory not in local.environments(2, {}, ["0", "1"])[0]
    assert local.environments(3, {}, ["0", "1"])[0][memory] == "0.450"
    assert local.environments(3, {memory: "0.1"}, ["0"])[0][memory] == "0.1"


def test_the_newest_records_need_only_the_end_of_the_file(tmp_path):
    line = '{"kind":"train","step":%d,"loss":"NaN","x":"%s"}\n'
    lines = [line % (step, "y" * 500_000) for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"kind')
    newest = runs.newest_records(tmp_path)
    assert newest["train"]["step"] == 3 and np.isnan(newest["train"]["loss"])
    assert runs.newest_records(tmp_path / "none") == {}


def test_a_live_table_on_a_terminal(tmp_path):
    settings = make_settings([{"train.seed": 1}], lambda _: tiny.values())
    progress = {settings[0].id: Progress("new")}
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True)
    with board.Board(console, settings, progress) as shown:
        runs = pool(tmp_path, 1, shown.watch)
        shown.eta = runs.eta
        runs.run([job(tmp_path, settings[0].id)])
    last = text.getvalue().rpartition("val bpb")[2]
    assert "finished" in last and "2.2500" in last and "1 finished  ETA 0:00" in last


def test_a_log_line_for_each_run_that_begins_or_ends(tmp_path):
    settings = make_settings(
        [{"train.seed": 1}, {"train.seed": 2}], lambda _: tiny.values()
    )
    progress = {setting.id: Progress("new") for setting in settings}
    text = io.StringIO()
    console = Console(file=text, width=80)
    first = job(pathlib.Path(), settings[0].id)
    with board.Board(console, settings, progress) as shown:
        shown.eta = lambda: 90.0
        shown.watch(first, Progress("running"))
        shown.watch(first, Progress("running", 2, 1.5))
        shown.watch(first, Progress("failed", 2, 1.5, None, "exit code 1: " + "x" * 99))
        console.print(shown.table())
    lines = text.getvalue().splitlines()
    assert lines[0] == f"{first.id} running  what=finish"
    assert lines[1] == f"{first.id} failed  exit code 1: {'x' * 99}  ETA 1:30"
    assert "1 failed, 1 new  ETA 1:30" in lines[-1]
