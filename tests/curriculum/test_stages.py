"""Stages become configs; what cannot work is named with its stage."""

import pytest

from kimi_jax.curriculum import criteria
from kimi_jax.curriculum.stages import make_stages
from kimi_jax.errors import UserError
from tests import tiny

STAGE = {"length": 32, "tokens": 1280, "batch_tokens": 128}


def make(*stages, common=()):
    return make_stages([STAGE | stage for stage in stages], tiny.values(), common)


def test_a_stage_is_a_config():
    first, second = make(
        {},
        {
            "length": 64,
            "long_share": 0.75,
            "until": {"loss_slope": 0.02},
            "rounds": 3,
            "optimizer.final_fraction": 1.0,
            "mesh.context": 2,
            "model.mla.rope_base": 5e5,
        },
    )
    train = first.config.train
    assert (train.seq_len, train.batch_size, train.steps) == (32, 4, 10)
    assert first.name == "stage_01_32" and first.round_tokens == 1280
    assert first.rounds == 1 and first.until == {}
    config = second.at(3)
    assert (config.train.batch_size, config.train.steps) == (2, 30)
    assert config.data.strata == (64,)
    assert config.data.strata_mixture == ((0.0, 0.25, 0.75),)
    assert config.mesh.context == 2 and config.model.mla.rope_base == 5e5
    assert second.overrides[0] == "train.seq_len=64"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"lenght": 3}, "did you mean 'length'"),
        ({"length": 0}, "length=0: must be a whole number"),
        ({"rounds": 1.5}, "rounds=1.5: must be a whole number"),
        ({"batch_tokens": 100}, "not whole rows of 32; try 96"),
        ({"long_share": 1.5}, "long_share=1.5: a share"),
        ({"long_share": 0.5, "data.strata": (9,)}, "give one of them"),
        ({"model.width": 32}, "config.model.width: all stages of a run share it"),
        ({"data.sources": ("x",)}, "config.data.sources: all stages"),
        ({"optimizer.rate": 1.0}, "config.optimizer.rate: no such field"),
        ({"mesh.tensor": 3}, "tensor=3 does not divide"),
        ({"until": {"slope": 1.0}}, "did you mean 'loss_slope'"),
        ({"until": {"loss_slope": 0}}, "loss_slope=0: can never be met"),
        ({"until": {"validation_loss": -1}}, "can never be met, as a loss is positive"),
        ({"until": {"position_gap": "x"}}, "must be a number of nats"),
        ({"until": {"loss_slope": 0.1}, "train.eval_every": 9}, "use 2 or less"),
        ({"rounds": 2}, "without `until` nothing asks"),
        ({"rounds": 2, "until": {"position_gap": 0}}, "optimizer.final_fraction=1.0"),
    ],
)
def test_what_cannot_work_is_named_with_its_stage(stage, words):
    with pytest.raises(UserError, match=r"nothing has run") as caught:
        make({}, stage)
    assert words in str(caught.value) and "stage 2: " in str(caught.value)
    assert "stage 1: " not in str(caught.value)


def test_the_command_line_may_not_fight_with_a_stage():
    with pytest.raises(UserError, match="the stage sets it; take it from"):
        make({}, common=["train.seq_len=16"])
    assert make({}, common=["train.seed=3"])[0].config.train.seed == 3


def evaluations(loss, steps=range(10, 101, 10), **last):
    return {step: {"loss": loss(step), **last} for step in steps}


def test_the_slope_is_nats_a_doubling_of_the_second_half():
    def loss(step):
        return 5.0 if step < 50 else 3.0 - 0.25 * (step / 100)

    found = criteria.loss_slope(evaluations(loss))
    # Linear in step, so that a doubling from 50 to 100 falls by an eighth of a nat.
    assert found == pytest.approx(0.125, rel=0.05)
    assert criteria.loss_slope(evaluations(lambda s: 2.0)) == pytest.approx(0, abs=1e-9)
    assert criteria.loss_slope(evaluations(loss, [50, 100])) != found  # too few: NaN


def test_the_gap_weighs_positions_by_their_tokens():
    record = {
        "position_loss": {"1": 5.0, "2": 4.0, "4": 3.0, "8": 2.0},
        "position_tokens": {"1": 1, "2": 1, "4": 2, "8": 4},
    }
    assert criteria.position_gap(record, 8) == pytest.approx(2.0 - 15 / 4)
    assert criteria.position_gap(record, 16) != criteria.position_gap(record, 16)


def test_verdicts():
    seen = evaluations(lambda s: 2.0)
    assert criteria.judge({}, seen, 8, 0).action == "advance"
    until = {"loss_slope": 0.1, "validation_loss": 1.0}
    stay = criteria.judge(until, seen, 8, 1)
    assert stay.action == "stay" and stay.reasons[0].endswith("met: 0.1")
    assert stay.reasons[1:] == ("validation_loss 2, not met: 1", "rounds left: 1")
    stop = criteria.judge(until, seen, 8, 0)
    assert stop.action == "stop" and stop.reasons[-1] == "rounds left: 0"
    assert criteria.judge({"validation_loss": 2.0}, seen, 8, 0).action == "advance"
    # Too few evaluations tell nothing, and nothing is not met.
    few = evaluations(lambda s: 2.0, [100])
    assert criteria.judge({"loss_slope": 9.0}, few, 8, 0).action == "stop"
