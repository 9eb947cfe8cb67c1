"""Published configs: both ways, against our own configs, and what is refused."""

import dataclasses
import json

import pytest

from configs import k3, kimi_linear_48b
from kimi_jax import config_io
from kimi_jax.config import attention_kinds
from kimi_jax.interop import hf_config
from kimi_jax.interop.entries import InteropError
from tests.interop import goldens


@pytest.mark.parametrize("file", [k3, kimi_linear_48b])
def test_the_releases_are_our_configs(file):
    model = config_io.from_dict(file.get_config()).model
    made = hf_config.parse(hf_config.publish(model)).model
    assert attention_kinds(made) == attention_kinds(model)
    # What no release says, and what no layer of it reads.
    free = {"attention": (), "gqa": model.gqa}
    if model.residual.kind == "none":
        free["residual"] = model.residual
    mla = dataclasses.replace(made.mla, block_size=model.mla.block_size)
    made = dataclasses.replace(made, mla=mla, **free)
    assert made == dataclasses.replace(model, attention=())


@pytest.mark.parametrize("name", goldens.TEXT)
def test_there_and_back(name):
    model = hf_config.read(goldens.FOLDER / name).model
    assert hf_config.parse(hf_config.publish(model)).model == model
    assert (
        config_io.model_from_dict(json.loads(json.dumps(config_io.to_dict(model))))
        == model
    )


def problem(name="kimi_linear_tiny", **changes):
    with pytest.raises(InteropError) as caught:
        hf_config.parse(goldens.config(name, **changes))
    return str(caught.value)


def test_every_problem_is_listed():
    message = problem(moe_renormalize=False, sliding_window=4096, hidden_act="gelu")
    assert "moe_renormalize=false: only true is supported" in message
    assert "sliding_window: unknown field" in message
    assert 'hidden_act="gelu": only situ or silu' in message


def test_contradictions_are_refused():
    linear = goldens.config()["linear_attn_config"]
    message = problem(linear_attn_config=linear | {"kda_layers": [1, 2, 3, 4]})
    assert "must name each of the layers 1 to 5 once" in message
    assert "num_key_value_heads=2: must equal" in problem(num_key_value_heads=2)
    assert "needs routed_expert_hidden_size" in problem(latent_moe_use_norm=True)
    message = problem("k3_tiny", activation_situ_beta=None)
    assert "activation_situ_beta: missing, but hidden_act is situ" in message
    assert "vocab_size=0: must be at least 1" in problem(vocab_size=0)


def test_unknown_quantisation_is_refused():
    other = {"quant_method": "gptq", "bits": 4}
    message = problem("k3_tiny", quantization_config=other)
    assert "quant_method=gptq" in message and "mxfp4-pack-quantized" in message
    values = goldens.config("k3_tiny_mxfp4")["text_config"]["quantization_config"]
    values["config_groups"]["group_0"]["weights"]["group_size"] = 16
    message = problem("k3_tiny", quantization_config=values)
    assert "weights.group_size=16: only 32 is supported" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", None, "num_hidden_layers=null: must be an integer"),
        ("num_experts", "8", 'num_experts="8": must be an integer above 0'),
        ("attn_res_block_size", "x", "must be a number above 0, or null"),
        ("linear_attn_config", None, "linear_attn_config=null: must be an object"),
        ("quantization_config", [4], r"quantization_config=\[4\]: must be an object"),
        (
            "linear_attn_config",
            {"kda_layers": [1, "a"]},
            r'linear_attn_config.kda_layers=\[1, "a"\]: must be a list of integers',
        ),
        (
            "quantization_config",
            {"config_groups": {"g": 3}},
            "quantization_config.config_groups.g=3: must be an object",
        ),
    ],
)
def test_fields_of_other_types_are_refused(field, value, words):
    with pytest.raises(InteropError, match=words):
        hf_config.parse({**goldens.config(), field: value})
    with pytest.raises(InteropError, match="no JSON object"):
        hf_config.parse([])


def test_models_that_no_release_can_express():
    model = hf_config.read(goldens.FOLDER / "k3_tiny").model
    kda = dataclasses.replace(model.kda, conv_width=None)
    with pytest.raises(InteropError, match=r"config\.model\.kda\.conv_width=none"):
        hf_config.publish(dataclasses.replace(model, kda=kda))
