"""Every complaint about a config names the field, the value and the fix."""

import json

import pytest

from kimi_jax import config_io
from kimi_jax.config import attention_kinds, ffn_kinds
from kimi_jax.config_io import ConfigError
from tests import tiny
from tests.modules import vision_cases


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
        (
            "mesh.data=3",
            "data=3 does not divide train.batch_size / micro",
        ),
        ("mesh.tensor=3", "tensor=3 does not divide model.kda.num_heads = 2; try "),
        ("mesh.tensor=0", "a number of devices, or -1 for the rest"),
        ("data.validation_fraction=1.0", "between 0 and 1"),
        ("data.packing=best", "did you mean 'best_fit'?"),
        ("data.strata=512,512", "must be at least 1 and increase, such as (512,)"),
        ("data.strata=0,512", "must be at least 1 and increase, such as (1, 512)"),
        ("data.strata=a", "config.data.strata[0]='a': must be int"),
        ("data.strata_mixture=((0.0, 1.0),)", "no strata to weigh"),
        ("data.mixture=0.5", "must be a tuple, such as ((0.0, 1.0),)"),
        ("data.mixture=0,0.5", "[0]=0: must be a tuple, such as (0.0, 1.0)"),
        ("data.mixture=((0, 1, 2)", "must be a tuple"),
        ("data.mixture=((0, 1, '2'),)", "mixture[0][2]='2': must be float"),
        ("data.mixture=((),)", "must be (fraction, 1 weights), has 0"),
        ("data.mixture=((0.0,),)", "must be (fraction, 1 weights), has 0"),
        ("data.mixture=((0.0, 1, 2), (0.5, 1))", "(fraction, 2 weights), has 1"),
        ("data.mixture=((0.0, 1, -1),)", "weights must be numbers of 0 or more"),
        ("data.mixture=((0.0, 1, 1e999),)", "mixture[0][2]=inf: must be a finite"),
        ("data.mixture=((0.0, 0, 0),)", "the weights sum to zero; give one of them"),
        ("data.mixture=((0.1, 1),)", "the first must begin at 0.0"),
        ("data.mixture=((0.0, 1), (0.0, 1))", "the others later and later"),
        ("data.mixture=((0.0, 1), (1.0, 1))", "below 1.0"),
        ("data.sources=()", "empty; name a file"),
        ("data.sources=a,b,a", "'a' is named twice"),
        ("data.tokenizer=", "write 'bytes'"),
        ("model.moe.capacity_factor=0.9", "must be at least 1, or slots"),
        ("optimizer.learning_rate=0", "must be positive"),
        ("optimizer.muon_update_rms=0", "must be positive"),
        ("optimizer.muon_dtype=float16", "'bfloat16'"),
        ("optimizer.momentum_dtype=float16", "'bfloat16'"),
        ("optimizer.qk_clip=-1", "must be positive"),
        ("optimizer.schedule=linear", "'wsd'"),
        ("optimizer.decay_shape=cosine", "'one_minus_sqrt'"),
        ("optimizer.decay_fraction=0", "must be in (0, 1]"),
        ("cluster.coordinator=10.0.0.1", "write HOST:PORT of process 0"),
        ("cluster.coordinator=host:66000", "write HOST:PORT of process 0"),
        ("cluster.processes=0", "must be at least 1"),
        ("cluster.process=-1", "must be at least 0"),
        ("cluster.timeout=0", "must be at least 1"),
        ("optimizer.learning_rate=nan", "learning_rate=nan: must be a finite number"),
        ("optimizer.learning_rate=-inf", "learning_rate=-inf: must be a finite number"),
        ("train.seed=-1", "must be 0 or more, and below 2**32"),
        ("data.seed=4294967296", "must be 0 or more, and below 2**32"),
        ("train.eval_length_multiples=4", "must begin with 1"),
        ("train.eval_length_multiples=1,4,2", "and increase, such as (1, 4)"),
        ("train.eval_length_multiples=()", "must begin with 1"),
        ("monitor.profile=10", "write FIRST:END, such as 10:13"),
        ("monitor.profile=3:3", "FIRST must be below END"),
        ("monitor.profile=3:9", "the run has 4 steps; end at 5 or before"),
        ("monitor.prometheus_port=0", "between 1 and 65535"),
        ("train.on_nonfinite=abort", "['stop', 'skip']"),
        ("train.max_skips=0", "must be at least 1"),
        ("alerts.load_entropy=1.0", "a share between 0 and 1, or none"),
        ("alerts.throughput_drop=0", "a share between 0 and 1, or none"),
        ("alerts.data_wait=2.0", "a share between 0 and 1, or none"),
        ("alerts.bias_update=0", "must be positive, or none"),
        ("alerts.loss_spike=-1", "must be positive, or none"),
        ("alerts.dead_steps=0", "must be at least 1"),
        ("sample.num_tokens=0", "must be at least 1"),
        ("alerts.window=4", "at least 5 records"),
        ("alerts.stop=loss", "'loss' is not one of ['load_entropy', "),
        ("model", "a section, not a value"),
        ("train.seq_len", "no value; write --config.train.seq_len=VALUE"),
        ("rl", "a section, not a value"),
        ("model={}", "a section, not a value"),
        ("name.x=1", "a value, not a section"),
    ],
)
def test_bad_override(override, words):
    extra = ("model.attention=gqa",) if "gqa" in override else ()
    found = problems(override, *extra)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.vision.num_layers=0", "model.vision.num_layers=0: must be at least 1"),
        ("model.vision.head_dim=6", "must be a multiple of 4"),
        ("model.vision.width=15", "must be even"),
        ("model.vision.placeholder=272", "a token below config.model.vocab_size=272"),
        ("model.vision.rope_base=0", "must be positive"),
        ("model.vision.widht=3", "did you mean config.model.vision.width?"),
        ("model.vision=3", "a section, not a value"),
        ("model.vision=none", "nothing can read images; set both to 0"),
        ("train.row_patches=38", "merged by 4; use row_patches=40"),
        ("train.row_items=0", "both at least 1, or both 0"),
        ("mesh.fsdp=3", "does not divide model.vision.width = 16; try"),
    ],
)
def test_bad_override_of_a_model_that_sees(override, words):
    with pytest.raises(ConfigError) as caught:
        vision_cases.make(override)
    assert any(words in p for p in caught.value.problems), caught.value.problems


def test_a_section_that_is_not_there_has_no_fields():
    (found,) = problems("model.vision.width=8")
    assert "config.model.vision: none in this config" in found
    text = ("model.vision=none", "train.row_patches=0", "train.row_items=0")
    assert vision_cases.make(*text).model.vision is None


def test_rules_across_fields_of_the_optimizer():
    (found,) = problems("optimizer.qk_clip=100", "model.attention=kda")
    assert "add 'mla' or 'gqa'" in found
    assert tiny.make("optimizer.qk_clip=100", "model.attention=gqa").optimizer.qk_clip
    late = ("optimizer.warmup_fraction=0.5", "optimizer.decay_fraction=0.75")
    (found,) = problems("optimizer.schedule=wsd", *late)
    assert "use at most 0.5" in found
    assert tiny.make(*late).optimizer.schedule == "cosine"


def test_the_number_of_a_process_is_below_their_count():
    (found,) = problems("cluster.processes=2", "cluster.process=2")
    assert "config.cluster.process=2: processes count from 0 to 1" in found
    cluster = tiny.make("cluster.process=1", "cluster.coordinator=[::1]:80").cluster
    assert (cluster.processes, cluster.process) == (None, 1)


def test_an_alert_that_is_off_cannot_stop_a_run():
    (found,) = problems("alerts.stop=data_wait", "alerts.data_wait=none")
    assert "set config.alerts.data_wait or take it out" in found
    stop = tiny.make("alerts.stop=loss_spike,dead_steps").alerts.stop
    assert stop == ("loss_spike", "dead_steps")
    assert tiny.make("alerts.stop=()").alerts.stop == ()


def test_traps_of_config_dicts():
    """A None field can be set, and set back; an int may be written for a float."""
    config = tiny.make("model.kda.conv_width=none", "model.mla.q_rank=None")
    assert config.model.kda.conv_width is None and config.model.mla.q_rank is None
    config = tiny.make("model.kda.implementation=xla")
    assert config.model.kda.implementation == "xla"
    assert tiny.make("model.residual.block_size=2").model.residual.block_size == 2.0
    assert tiny.make("train.steps=1e3").train.steps == 1000
    # The shell takes the quotes of '', which names the default corpus.
    assert tiny.make("data.sources=").data.sources == ("",)
    assert tiny.make("data.sources='',a").data.sources == ("", "a")


def test_how_a_run_is_watched():
    cfg = tiny.make("monitor.profile=3:5", "monitor.prometheus_port=9100")
    assert (cfg.monitor.profile, cfg.monitor.prometheus_port) == ("3:5", 9100)
    assert tiny.make("monitor.prometheus_port=none").monitor.prometheus_port is None
    multiples = tiny.make("train.eval_length_multiples=1,4").train.eval_length_multiples
    assert multiples == (1, 4)


def test_tables_of_numbers():
    rows = "((0.0, 0.7, 0.3), (0.5, 1, 1))"
    data = tiny.make(f"data.mixture={rows}", "data.strata=(512, 4096)").data
    assert data.mixture == ((0.0, 0.7, 0.3), (0.5, 1.0, 1.0))
    assert all(type(value) is float for row in data.mixture for value in row)
    assert data.strata == (512, 4096)
    assert tiny.make(f"data.mixture={rows}", "data.mixture=()").data.mixture == ()
    for spelling in ("[[0, 2, 1]]", "((0, 2, 1),)", " ((0.0, 2.0, 1.0),) "):
        assert tiny.make(f"data.mixture={spelling}").data.mixture == ((0, 2, 1),)
    strata = ("data.strata=9", "data.strata_mixture=((0, 1, 3),)")
    assert tiny.make(*strata).data.strata_mixture == ((0.0, 1.0, 3.0),)
    found = problems("data.strata=9", "data.strata_mixture=((0, 1, 3, 1),)")
    assert "strata_mixture[0]=(0.0, 1.0, 3.0, 1.0): must be (fraction, 2" in found[0]


def test_replaced_section_and_missing_field_in_a_file():
    def replace(values):
        del values.model.mla, values.model.kda
        values.model.kda = 3

    found = problems(change=replace)
    assert any("config.model.mla: missing" in problem for problem in found)
    assert any("config.model.kda=3: must be a section" in problem for problem in found)


def test_round_trip_through_plain_values():
    config = tiny.make("data.mixture=((0, 1, 2), (0.5, 1, 0))", "data.strata=64")
    values = config_io.to_dict(config)
    assert config_io.from_dict(values) == config
    assert config_io.from_dict(json.loads(json.dumps(values))) == config


def test_layer_patterns():
    model = tiny.make("model.attention=kda*2,gqa").model
    assert attention_kinds(model) == ("kda", "kda", "gqa") * 2
    explicit = tiny.make("model.attention=mla,kda*4,mla").model
    assert attention_kinds(explicit) == ("mla", *("kda",) * 4, "mla")
    assert ffn_kinds(model) == ("mlp", *("moe",) * 5)
