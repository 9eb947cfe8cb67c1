"""A run may be made longer, and nothing else."""

import json

import pytest

from kimi_jax.errors import UserError
from kimi_jax.train import workdir
from tests import tiny


def test_a_run_can_be_made_longer(tmp_path):
    short, long = tiny.make(), tiny.make("train.steps=8")
    assert not workdir.claim(tmp_path, short)
    with pytest.raises(UserError, match=r"config\.train\.steps: 4 in the workdir, 8"):
        workdir.check(tmp_path, long)
    workdir.prolong(tmp_path, long)
    assert workdir.check(tmp_path, long)
    # Not shorter again: that would be a run whose schedule it never had.
    workdir.prolong(tmp_path, short)
    assert json.loads((tmp_path / workdir.CONFIG).read_text())["train"]["steps"] == 8
    # What else differs is still refused.
    other = tiny.make("train.steps=16", "model.width=24")
    workdir.prolong(tmp_path, other)
    with pytest.raises(UserError, match=r"config\.model\.width: 16 in the workdir"):
        workdir.check(tmp_path, other)


def test_one_process_at_a_time(tmp_path):
    workdir.claim(tmp_path, tiny.make())
    busy = pytest.raises(UserError, match="another process is at work on this run")
    with workdir.hold(tmp_path), busy, workdir.hold(tmp_path):
        pass
    with workdir.hold(tmp_path):
        assert workdir.check(tmp_path, tiny.make())


def test_a_run_from_before_a_field_goes_on(tmp_path):
    cfg = tiny.make()
    workdir.claim(tmp_path, cfg)
    marker = tmp_path / workdir.CONFIG
    stored = json.loads(marker.read_text())
    del stored["rl"], stored["alerts"]["policy_kl"]
    marker.write_text(json.dumps(stored))
    assert workdir.check(tmp_path, cfg)
    assert workdir.load_config(tmp_path).rl is None
    # A field that was always there is still missed.
    del stored["model"]["width"]
    marker.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"config\.model\.width: absent in the workdir"):
        workdir.check(tmp_path, cfg)


def test_a_name_that_is_a_pattern_or_far_away_is_refused(tmp_path):
    cfg = tiny.make()
    for name in ("b[1]", "what?", "a*"):
        with pytest.raises(UserError, match="would be read as a pattern"):
            workdir.check(tmp_path / name, cfg)
    with pytest.raises(UserError, match="without ://"):
        workdir.check("gs://bucket/run", cfg)
    assert not workdir.check(tmp_path / "a $ü 'b'", cfg)


def test_a_run_whose_config_is_gone_says_where_it_is(tmp_path):
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no config.json.*checkpoints/N/about"):
        workdir.check(tmp_path, tiny.make())
