"""Every complaint about `config.rl` names the field, the value and the fix."""

import pytest

from configs import common
from kimi_jax import config_io
from kimi_jax.config_io import ConfigError
from tests import tiny


def values():
    config = tiny.values()
    config.rl = common.rl()
    config.rl.update(environments=("tools",), iterations=4, max_tokens=32)
    config.rl.update(turn_tokens=8, slots=8)
    return config


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_io.from_dict(values(), overrides)
    return caught.value.problems


def test_the_section_fits_and_may_be_absent():
    assert config_io.from_dict(values()).rl.group_size == 8
    assert config_io.from_dict(values(), ["rl=none"]).rl is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rl.environments=()", "name at least one"),
        ("rl.group_size=0", "must be at least 1"),
        ("rl.group_size=1", "compares the members of a group; use at least 2"),
        ("rl.slots=1", "use at least 2"),
        ("rl.max_tokens=40", "use max_tokens=33 or less, or seq_len=40"),
        ("rl.turn_tokens=33", "more than max_tokens=32"),
        ("rl.iterations=3", "use train.steps=3"),
        ("rl.max_calls=0", "must be at least 1"),
        ("rl.max_seconds=0", "must be positive"),
        ("rl.temperature=0", "must be positive"),
        ("rl.top_p=0.0", "must be in (0, 1]"),
        ("rl.clip_low=1.5", "must be at most 1"),
        ("rl.correction_cap=0.5", "must be at least 1"),
        ("rl.turn_credit=1.5", "at most 1"),
        ("rl.entropy_weight=-1.0", "must not be negative"),
        ("rl.rewards=none", "set config.rl.teacher"),
        ("rl.advantage=meen", "did you mean 'mean'?"),
        ("rl.rewards=random", "allowed are ['task', 'shuffled', 'none']"),
        ("rl.segment=5", "does not divide config.train.seq_len=32"),
        ("rl.teacher=runs/x", "set both, or neither"),
        ("rl.reuse=1.0", "a share of a batch"),
        ("rl.sampler.floor=0.0", "never tried again"),
        ("rl.sampler.target_low=0.9", "0 < target_low <= target_high < 1"),
        ("rl.sampler.ema=1.0", "must be in [0, 1)"),
        ("rl.sampler.length_threshold=2.0", "a success rate; 0 draws"),
        ("rl.rollout_mesh.data=2", "none in this config, so it has no fields"),
    ],
)
def test_bad_override(override, words):
    (problem,) = problems(override)
    assert problem.startswith("config.") and words in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rl.max_staleness=0", "rl.reuse=0.5"), "use max_staleness=1 or more"),
        (("rl.max_staleness=0", "rl.max_calls=9"), "use max_staleness=1 or more"),
        (("rl.kl_weight=0.1", "rl.kl_to="), "names no reference"),
        (("rl.replay_routes=true", "model.ffn.num_dense_layers=6"), "no experts"),
        (("rl.segment=16", "mesh.context=2"), "split over config.mesh.context=2"),
    ],
)
def test_fields_that_do_not_go_together(overrides, words):
    (problem,) = problems(*overrides)
    assert words in problem


def test_all_problems_come_at_once():
    assert len(problems("rl.slots=1", "rl.iterations=9", "rl.reuse=2.0")) == 3
