"""Every complaint about a config names the field, the value and the fix."""

import pytest

from kimi_jax import config_io
from kimi_jax.config import attention_kinds, ffn_kinds
from kimi_jax.config_io import ConfigError
from tests import tiny


def problems(*overrides: str, change=None) -> tuple[str, ...]:
    values = tiny.values()
    if change is not None:
        change(values)
    with pytest.raises(ConfigError) as caught:
        config_io.from_dict(values, overrides)
    return caught.value.problems


def test_all_problems_are_reported_at_once():
    found = problems(
        "model.widht=3", "train.steps=1.5", "model.moe.balancing.method=non"
    )
    assert len(found) == 3
    assert "did you mean config.model.width?" in found[0]
    assert "did you mean 'none'?" in found[1]
    assert "config.train.steps=1.5: must be int" in found[2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.moe.num_active=99", "more than num_experts=4"),
        ("train.micro_batches=3", "try micro_batches="),
        ("train.checkpoint_keep_every=3", "a multiple of checkpoint_every=2"),
        ("train.checkpoint_keep_every=0", "must be at least 1"),
        ("model.attention=kda*9", "names 9 layers"),
        ("model.attention=kda,mlp", "'mlp' is not one of"),
        ("model.kda.gate_lower_bound=-6.0", "must be in [-5, 0)"),
        ("model.kda.chunk_size=48", "allowed are 16, 32, 64, 128"),
        ("model.residual.block_size=1.5", "0.5 for one sublayer"),
        ("model.gqa.num_kv_heads=3", "not divisible"),
        ("model.moe.latent_width=none", "needs latent_width"),
        ("model.width=0", "must be at least 1"),
        ("mesh.data=3", "does not divide the 4 rows"),
        ("data.validation_fraction=1.0", "between 0 and 1"),
        ("optimizer.learning_rate=0", "must be positive"),
        ("model", "no value"),
        ("model={}", "a section, not a value"),
        ("name.x=1", "a value, not a section"),
    ],
)
def test_bad_override(override, words):
    extra = ("model.attention=gqa",) if "gqa" in override else ()
    found = problems(override, *extra)
    assert any(words in problem for problem in found), found


def test_traps_of_config_dicts():
    """A None field can be set, and set back; an int may be written for a float."""
    config = tiny.make("model.kda.conv_width=none", "model.mla.q_rank=None")
    assert config.model.kda.conv_width is None and config.model.mla.q_rank is None
    config = tiny.make("model.kda.implementation=xla")
    assert config.model.kda.implementation == "xla"
    assert tiny.make("model.residual.block_size=2").model.residual.block_size == 2.0
    assert tiny.make("train.steps=1e3").train.steps == 1000


def test_replaced_section_and_missing_field_in_a_file():
    def replace(values):
        del values.model.mla, values.model.kda
        values.model.kda = 3

    found = problems(change=replace)
    assert any("config.model.mla: missing" in problem for problem in found)
    assert any("config.model.kda=3: must be a section" in problem for problem in found)


def test_round_trip_through_plain_values():
    config = tiny.make()
    assert config_io.from_dict(config_io.to_dict(config)) == config


def test_layer_patterns():
    model = tiny.make("model.attention=kda*2,gqa").model
    assert attention_kinds(model) == ("kda", "kda", "gqa") * 2
    explicit = tiny.make("model.attention=mla,kda*4,mla").model
    assert attention_kinds(explicit) == ("mla", *("kda",) * 4, "mla")
    assert ffn_kinds(model) == ("mlp", *("moe",) * 5)
