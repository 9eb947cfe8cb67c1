"""Seconds go where they belong, over several sessions."""

import pytest

from kimi_jax.train.clock import Clock, clock_of


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_steps_waits_and_pauses_are_told_apart():
    now = Time()
    watch = Clock(990.0, productive=5.0, wall=now, monotonic=now)
    now.now += 10  # compilation

    def slow():
        for item in "ab":
            now.now += 0.25
            yield item

    watch.start()
    seen = []
    for item in watch.waiting(slow()):
        now.now += 1.0
        seen.append(item)
    with watch.stopped():
        now.now += 7.0
    assert seen == ["a", "b"]
    assert watch.lap() == (2.5, 0.5)
    assert watch.productive == 7.5
    assert watch.productive_share == pytest.approx(7.5 / 29.5)
    # A pause in the middle of a lap loses nothing of the lap.
    now.now += 1.0
    with watch.stopped():
        now.now += 100.0
    now.now += 2.0
    assert watch.lap() == (3.0, 0.0)
    assert watch.lap() == (0.0, 0.0)


def test_a_resumed_run_goes_on_counting():
    records = [
        {"kind": "run", "step": 0, "time": 100.0},
        {"kind": "train", "step": 1, "time": 110.0, "productive_seconds": 4.0},
        {"kind": "train", "step": 2, "time": 120.0, "productive_seconds": 8.0},
        {"kind": "run", "step": 2, "time": 300.0, "event": "resume"},
    ]
    watch = clock_of(records, wall=lambda: 340.0)
    assert watch.productive == 8.0
    assert watch.productive_share == pytest.approx(8 / 240)
