"""Alerts from made-up records: when they begin, end, and begin again after a resume."""

import dataclasses
import math

import pytest

from kimi_jax import config
from kimi_jax.monitor.alerts import Alerts
from kimi_jax.monitor.report_alerts import alerts_section
from kimi_jax.train.alarm import stop_message

ON = config.Alerts(
    load_entropy=0.7,
    dead_steps=30,
    bias_update=0.5,
    loss_spike=1.0,
    throughput_drop=0.5,
    data_wait=0.4,
    policy_kl=0.3,
    mismatch=0.05,
    effective_samples=0.2,
    zero_variance=0.9,
    environment_errors=0.1,
    window=6,
    stop=(),
)
OFF = config.Alerts(*[None] * 11, window=6, stop=())


def train(step, **changes):
    layers = {
        "moe/layer_index": [1, 3],
        "moe/load_entropy": [0.98, 0.99],
        "moe/bias_update": [0.1, 0.01],
    }
    layers |= changes.pop("layers", {})
    healthy = {
        "kind": "train",
        "step": step,
        "loss": 3.0,
        "loss_max": 3.2,
        "tokens_per_second": 1000.0,
        "data_wait_share": 0.01,
        "idle_experts": {},
        "layers": layers,
    }
    return healthy | changes


def seen(alerts, *records):
    return [(a.name, a.step) for r in records for a in alerts.see(r)]


def warm(cfg=ON):
    """Alerts that have seen six healthy records, at steps 10 to 60."""
    alerts = Alerts(cfg)
    assert not seen(alerts, *(train(step) for step in range(10, 70, 10)))
    return alerts


BAD = {
    "load_entropy": {"layers": {"moe/load_entropy": [0.98, 0.69]}},
    "bias_update": {"layers": {"moe/bias_update": [0.6, 0.01]}},
    "loss_spike": {"loss_max": 4.1},
    "throughput_drop": {"tokens_per_second": 490.0},
    "data_wait": {"data_wait_share": 0.41},
    "policy_kl": {"rl": {"policy_kl": 0.31}},
    "mismatch": {"rl": {"mismatch": 0.06}},
    "effective_samples": {"rl": {"effective_samples": 0.19}},
    "zero_variance": {"rl": {"zero_variance": 0.95}},
    "environment_errors": {"rl": {"environment_errors": 0.2}},
}


@pytest.mark.parametrize("name", BAD)
def test_an_alert_is_raised_when_it_begins_and_when_it_begins_again(name):
    alerts, bad = warm(), BAD[name]
    steps = [bad, bad, {}, bad]
    records = [train(70 + 10 * i, **change) for i, change in enumerate(steps)]
    assert seen(alerts, *records) == [(name, 70), (name, 100)]
    assert seen(warm(OFF), *records) == []
    # A switch each: all others on.
    some = dataclasses.replace(ON, **{name: None})
    assert seen(warm(some), *records) == []


def test_messages_carry_place_value_and_limit():
    alerts = warm()
    change = {"layers": {"moe/load_entropy": [0.2, 0.1]}}
    (alert,) = alerts.see(train(70, **change))
    assert alert.message == "load entropy down to 0.100, below 0.7: layer 1, layer 3"
    assert (alert.value, alert.threshold) == (0.1, 0.7)
    (alert,) = alerts.see(train(80, tokens_per_second=250.0))
    assert alert.message == "throughput is 75% below its running median (limit 50%)"
    (alert,) = alerts.see(train(90, loss_max=4.5))
    assert "1.500 nats above the running median (limit 1)" in alert.message


def test_another_layer_is_news():
    first = {"layers": {"moe/load_entropy": [0.2, 0.9]}}
    both = {"layers": {"moe/load_entropy": [0.2, 0.3]}}
    alerts = warm()
    assert len(alerts.see(train(70, **first))) == 1
    (alert,) = alerts.see(train(80, **both))
    assert alert.message.endswith("layer 3") and alert.value == 0.3


def test_an_expert_is_dead_after_enough_steps_in_a_row():
    alerts = warm()
    idle = {"idle_experts": {"3": [5, 7]}}
    # Expert 7 gets a token in between; 5 has had none for 30 steps at step 90.
    records = [train(70, **idle), train(80, idle_experts={"3": [5]}), train(90, **idle)]
    assert seen(alerts, *records[:2]) == []
    (alert,) = alerts.see(records[2])
    assert alert.message == "no token for 30 steps (limit 30): expert 5 of layer 3"
    assert seen(alerts, train(100, **idle), train(110, **idle)) == [("dead_steps", 110)]


def test_medians_need_a_few_records_and_ignore_nan():
    alerts = Alerts(ON)
    early = [train(s, loss=9.0 / s, loss_max=9.0, tokens_per_second=s) for s in (1, 2)]
    assert seen(alerts, *early) == []
    alerts = warm()
    nan = {"loss": math.nan, "loss_max": math.nan}
    assert seen(alerts, *(train(s, **nan) for s in range(70, 170, 10))) == []
    assert seen(alerts, train(170, loss_max=4.1)) == [("loss_spike", 170)]


def test_old_records_rebuild_the_memory():
    """A new object that is shown the records goes on as the old one would."""
    idle = {"idle_experts": {"1": [0]}}
    records = [train(s, **BAD["data_wait"]) for s in range(10, 70, 10)]
    records += [train(70, **idle), train(80, **idle)]
    old, new = Alerts(ON), Alerts(ON)
    for record in records:
        old.see(record)
        new.see(record)
    tail = [train(90, **idle, loss_max=4.2), train(100, **BAD["data_wait"])]
    want = [("dead_steps", 90), ("loss_spike", 90), ("data_wait", 100)]
    assert seen(new, *tail) == want
    # A resumed run may be on a slower machine: that is no drop.
    resume = {"kind": "run", "step": 80, "event": "resume"}
    assert seen(old, resume, *tail) == want
    slow = train(110, tokens_per_second=100.0)
    assert seen(new, slow) == [("throughput_drop", 110)] and seen(old, slow) == []


def test_records_of_other_kinds_and_of_small_models_are_fine():
    assert seen(Alerts(ON), {"kind": "eval", "step": 3, "loss": 1.0}) == []
    assert seen(Alerts(ON), {"kind": "train", "step": 3, "loss": 1.0}) == []


def test_the_report_lists_them():
    assert alerts_section([]) == ""
    alerts = [
        {"kind": "alert", "step": 1000 + i, "name": "loss_spike", "message": "a | b"}
        for i in range(22)
    ]
    text = alerts_section(alerts)
    assert "Raised: loss_spike 22." in text and "And 2 later ones." in text
    assert "| 1,000 | loss_spike | a \\| b |" in text and "1,020" not in text


def test_the_message_at_the_end_says_what_to_do(tmp_path):
    (alert,) = warm().see(train(70, **BAD["loss_spike"]))
    text = stop_message([alert], tmp_path)
    assert "after step 70, which is saved" in text and "loss_spike: " in text
    assert "'--config.alerts.stop=()'" in text
