"""Settings have one id each, whatever their spelling; mistakes are named at once."""

import pytest

from configs import hyper
from kimi_jax import config_io
from kimi_jax.errors import UserError
from kimi_jax.sweep import settings
from tests import tiny


def load(argument=""):
    values = tiny.values()
    if argument:
        values.train.steps = int(argument)
    return values


def make(*overrides, **options):
    return settings.make_settings(overrides, load, **options)


def test_products_zips_and_chains():
    rates, seeds = hyper.grid("optimizer.learning_rate", 1e-3, 2e-3), hyper.seeds(3)
    both = hyper.product(rates, seeds)
    assert len(both) == 6
    assert both[1] == {"optimizer.learning_rate": 1e-3, "train.seed": 1}
    assert hyper.zipped(rates, hyper.seeds(2)) == [
        {"optimizer.learning_rate": 1e-3, "train.seed": 0},
        {"optimizer.learning_rate": 2e-3, "train.seed": 1},
    ]
    assert hyper.chain([{}], seeds) == [{}, *seeds]
    assert hyper.product() == [{}]
    with pytest.raises(ValueError, match=r"\[2, 3\] settings"):
        hyper.zipped(rates, seeds)
    with pytest.raises(ValueError, match="both set 'train"):
        hyper.product(seeds, seeds)


def test_an_id_depends_on_what_is_said_and_on_nothing_else():
    (a,) = make({"train.seed": 1, "optimizer.learning_rate": 1e-3})
    (b,) = make({"optimizer.learning_rate": 0.001, "train.seed": 1})
    (c,) = make({"train.seed": 1}, common=["optimizer.learning_rate=1e-3"])
    assert a.id == b.id == c.id and len(a.id) == 8
    (whole,) = make({"optimizer.weight_decay": 0, "train.seed": 1})
    (point,) = make({"optimizer.weight_decay": 0.0, "train.seed": 1})
    assert whole.id == point.id != a.id
    # Pinned: another hash would orphan the folders of every sweep.
    assert make({"train.seed": 1})[0].id == "36f02d40"
    assert make({"arg": "7"})[0].config.train.steps == 7
    assert make({}, argument="7")[0].id == make({"arg": "7"})[0].id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.qk_clip", None),
        ("optimizer.qk_clip", 30.5),
        ("optimizer.muon_per_head", False),
        ("model.attention", ("gqa",)),
        ("model.attention", ("kda*2", "mla")),
        ("train.eval_length_multiples", (1, 4)),
        ("data.strata", ()),
        ("data.mixture", ((0.0, 1.0), (0.5, 2.0))),
        ("model.kda.gate_lower_bound", -1e-3),
        ("name", "it's a name"),
    ],
)
def test_the_command_of_a_run_says_what_the_setting_says(name, value):
    (setting,) = make({name: value})
    first, flag = settings.arguments("configs/x.py", setting)
    assert first == "--config=configs/x.py"
    again = config_io.from_dict(load(), [flag.removeprefix("--config.")])
    assert again == setting.config
    assert setting.overrides == {name: value}


def test_the_argument_of_a_setting_comes_after_the_colon():
    (setting,) = make({"arg": "7"}, argument="5")
    assert settings.arguments("configs/x.py", setting) == ["--config=configs/x.py:7"]
    assert setting.swept == {"arg": "7"}


def test_a_group_is_a_setting_without_its_seeds():
    (setting,) = make({"train.seed": 1, "data.seed": 2, "train.batch_size": 8})
    assert setting.group == {"train.batch_size": 8}
    assert settings.describe(setting.swept) == "train.seed=1 data.seed=2 batch_size=8"


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ([], "at least one setting"),
        (["train.seed=1"], "setting 1 of get_hyper"),
        (
            [{}, {"train.sed": 1}],
            r"setting 2 \(sed=1\).*did you mean config.train.seed",
        ),
        ([{"train.steps": 0}], "config.train.steps=0: must be at least 1"),
        ([{"model": {}}], "a section, not a value"),
        ([{"train.seed": 1}, {"train.seed": 1.5}], r"seed=1.5.*must be int"),
        ([{"train.seed": 1}, {"train.seed": 1.0}], "one and the same run"),
        ([{"train.seed": 1}, {"train.seed": 1}], "one and the same run"),
        # The value of the file, once by name and once not.
        ([{"train.seed": 0}, {}], "one and the same run"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_named_before_anything_runs(hyper, words):
    with pytest.raises(UserError, match=words):
        settings.make_settings(hyper, load)


def test_what_is_wrong_with_many_settings_is_said_once():
    with pytest.raises(UserError) as caught:
        settings.make_settings([{"train.sed": 1}, {}, {"train.sed": 2}], load)
    assert str(caught.value).count("did you mean") == 1
    assert "1 problem;" in str(caught.value)
    assert "setting 1 (sed=1) and 1 more: " in str(caught.value)


def test_the_command_line_may_not_fight_with_the_sweep():
    with pytest.raises(UserError, match="the sweep sets it itself"):
        make({"train.seed": 1}, common=["train.seed=2"])
