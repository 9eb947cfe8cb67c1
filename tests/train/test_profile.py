"""Which steps are traced, and that a trace begun is ended."""

import pytest

from kimi_jax.config import Monitor, profile_steps
from kimi_jax.train.profile import Profiler


def monitor(steps: str) -> Monitor:
    return Monitor(profile=steps, prometheus_port=None)


@pytest.fixture
def calls(monkeypatch):
    """What the profiler of JAX is asked for."""
    seen = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda *a, **k: seen.append("on"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: seen.append("off"))
    return seen


def run(calls, tmp_path, steps, first, last, notes):
    """Runs the steps first + 1 to `last`."""
    with Profiler(monitor(steps), tmp_path, notes.append) as profiler:
        step_fn = profiler.around(lambda step: calls.append(step), first)
        for step in range(first + 1, last + 1):
            step_fn(step)
        calls.append("end")


def test_chosen_steps_are_traced(calls, tmp_path):
    notes = []
    run(calls, tmp_path, "3:5", 0, 6, notes)
    assert calls == [1, 2, "on", 3, 4, "off", 5, 6, "end"]
    (note,) = notes
    assert str(tmp_path / "profile") in note and "xprof --logdir" in note


def test_a_run_that_ends_or_resumes_inside(calls, tmp_path):
    run(calls, tmp_path, "3:5", 3, 4, [])
    assert calls == ["on", 4, "off", "end"]
    calls.clear()
    run(calls, tmp_path, "3:9", 0, 3, notes := [])
    assert calls == [1, 2, "on", 3, "end", "off"] and len(notes) == 1


def test_steps_that_are_past_and_no_steps(calls, tmp_path):
    run(calls, tmp_path, "3:5", 4, 6, notes := [])
    assert calls == [5, 6, "end"]
    assert notes == ["profile: step 4 is past, nothing is traced"]
    with Profiler(monitor(""), tmp_path, notes.append) as profiler:
        assert profiler.around(print, 0) is print


def test_spelling():
    assert profile_steps(monitor("10:13")) == range(10, 13)
    assert profile_steps(monitor("")) is None
    for wrong in ("10", "a:b", "10:", "-1:3", "1.5:3"):
        with pytest.raises(ValueError, match="FIRST:END"):
            profile_steps(monitor(wrong))
    for wrong in ("0:3", "3:3", "5:2"):
        with pytest.raises(ValueError, match="below END"):
            profile_steps(monitor(wrong))
