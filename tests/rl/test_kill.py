"""Kill -9 at a random moment: the run goes on, and not one bit is different.

As in tests/train/test_kill.py, each life of the run is a process of its own.
"""

import time

import jax
import numpy as np
import pytest
from rich.console import Console

from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.rl import archive, loop
from kimi_jax.train import checkpoint_files as files
from tests.rl import test_loop
from tests.train.test_kill import LEASH, Life, starter, wait_for_it

ITERATIONS = LEASH + 1
OVERRIDES = (
    f"rl.iterations={ITERATIONS}",
    f"train.steps={ITERATIONS}",
    f"train.eval_every={ITERATIONS}",
    "train.checkpoint_every=2",
)


def live(root, name, prepare=None):
    """One life: to the last iteration, after `prepare`."""
    jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if prepare is not None:
        prepare()
    cfg = test_loop.make(*OVERRIDES)
    with open(root / f"{name}.log", "a") as log:
        loop.reinforce(cfg, str(root / name), console=Console(file=log, width=200))


@pytest.fixture(scope="module")
def start():
    return starter(live)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(start, tmp_path, capsys):
    code, _ = (life := Life(start, tmp_path, name="whole")).ends()
    assert code == 0, life.said()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    times = [r["time"] for r in read_metrics(whole / "metrics.jsonl") if "rl" in r]
    pace = np.median(np.diff(times))
    life = Life(start, tmp_path, wait_for_it)
    life.until(lambda: files.steps(parts), seconds=300)
    time.sleep(np.random.default_rng().uniform(0.0, 3 * pace))
    life.kill()
    (saved, *_), written = files.steps(parts), len(test_loop.curve(parts))
    with capsys.disabled():
        print(f"\nkilled after {written} records; step {saved} was durable")
    assert 2 <= saved < ITERATIONS
    code, _ = (life := Life(start, tmp_path)).ends()
    assert code == 0, life.said()
    (want, beside), (got, also) = test_loop.stored(whole), test_loop.stored(parts)
    assert want.keys() == got.keys() and int(got["step"]) == ITERATIONS
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert beside == also
    assert test_loop.curve(parts) == test_loop.curve(whole)
    assert len(archive.iterations(whole)) == ITERATIONS
    for iteration in archive.iterations(whole):
        assert archive.read(parts, iteration) == archive.read(whole, iteration)
