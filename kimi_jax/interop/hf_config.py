"""A published config.json as a model config, and back.

K3 and Kimi-Linear both call themselves `kimi_linear`, so nothing here asks for a name:
every choice follows from a field. A field that this table does not know could mean a
model that we do not have, so it is refused, as is one whose value we cannot honour.

Source: config.json of the released checkpoints.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kimi_jax import config, config_io
from kimi_jax.interop import vision_config
from kimi_jax.interop.entries import InteropError
from kimi_jax.interop.field_types import wrong_types

CONFIG = "config.json"

# Published field -> where the value is kept here.
_DIRECT = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "intermediate_size": "ffn.width",
    "first_k_dense_replace": "ffn.num_dense_layers",
    "num_attention_heads": "mla.num_heads",
    "q_lora_rank": "mla.q_rank",
    "kv_lora_rank": "mla.kv_rank",
    "qk_nope_head_dim": "mla.nope_dim",
    "qk_rope_head_dim": "mla.pe_dim",
    "v_head_dim": "mla.value_dim",
    "num_experts": "moe.num_experts",
    "num_experts_per_token": "moe.num_active",
    "num_shared_experts": "moe.num_shared",
    "moe_intermediate_size": "moe.expert_width",
    "routed_scaling_factor": "moe.routed_scaling",
}
# May be left out, and then are this.
_OPTIONAL = {"initializer_range": 0.02, "q_lora_rank": None}
# Published field -> the only values that this library computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("kimi_linear", "kimi_k3"),
    "mla_use_nope": (True,),
    "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "topk_method": ("noaux_tc", None),
    "num_nextn_predict_layers": (0, None),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
}
# Read by `_choices`.
_CHOICES = {
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "attn_res_block_size",
    "linear_attn_config",
    "num_key_value_heads",
    "quantization_config",
}
# Change no number of the forward pass.
_UNUSED = {
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "ignore_index",
    "image_placeholder",
    "max_position_embeddings",
    "media_placeholder_token_id",
    "model_max_length",
    "pad_token_id",
    "rope_parameters",
    "rope_theta",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_grouped_topk",
}
_OUTER = {
    "text_config",
    "vision_config",
    "quantization_config",
    "use_unified_vision_chunk",
}
_LINEAR = {
    "head_dim",
    "num_heads",
    "short_conv_kernel_size",
    "full_attn_layers",
    "kda_layers",
    "use_full_rank_gate",
    "gate_lower_bound",
}
# How a quantised release says so; anything else would be read as something it is not.
_FORMAT = "mxfp4-pack-quantized"
_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": 32,
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "dynamic": False,
}


class Release(NamedTuple):
    """What a published config.json says.

    prefix: of the language model's tensors.
    packed: the routed experts are said to be in MXFP4.
    published: the whole file.
    """

    model: config.Model
    prefix: str
    packed: bool
    published: dict[str, Any]


def read(folder: str | os.PathLike[str]) -> Release:
    """The release in `folder`, from its config.json.

    Raises:
      InteropError: no such file, or see `parse`.
    """
    file = pathlib.Path(folder) / CONFIG
    try:
        published = json.loads(file.read_bytes())
    except OSError as error:
        raise InteropError(
            f"{file}: {error.strerror}; name a folder that holds a published checkpoint"
        ) from error
    except ValueError as error:
        raise InteropError(f"{file} is not JSON: {error}") from error
    try:
        return parse(published)
    except InteropError as error:
        raise InteropError(f"{file}: {error}") from None


def parse(published: Any) -> Release:
    """The model that `published`, a config.json, describes.

    Raises:
      InteropError: unknown, missing or contradictory fields, all of them.
    """
    problems = list(wrong_types(published))
    outer = {} if problems else dict(published)
    text = dict(outer.get("text_config") or outer)
    if problems := problems or list(_problems(outer, text)):
        raise InteropError("cannot be read:\n  " + "\n  ".join(problems))
    try:
        model = config_io.model_from_dict(_values(outer, text))
    except config_io.ConfigError as error:
        raise InteropError(f"describes no model of ours: {error}") from error
    return Release(
        model,
        "language_model." if "text_config" in outer else "",
        bool(_quantisation(outer, text)),
        outer,
    )


def _quantisation(outer: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    return text.get("quantization_config") or outer.get("quantization_config")


def _problems(outer: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    known = set(_DIRECT) | set(_FIXED) | _CHOICES | _UNUSED
    if "text_config" in outer:
        allowed = _OUTER | {"model_type", "tie_word_embeddings"} | _UNUSED
        yield from (f"{name}: unknown field" for name in sorted(set(outer) - allowed))
        if outer.get("vision_config"):
            yield from vision_config.problems(outer, text)
    yield from (f"{name}: unknown field" for name in sorted(set(text) - known))
    for name in [*_DIRECT, "hidden_act", "linear_attn_config"]:
        if name not in text and name not in _OPTIONAL:
            yield f"{name}: missing"
    for name, allowed_values in _FIXED.items():
        if name in text and text[name] not in allowed_values:
            values = " or ".join(map(json.dumps, allowed_values))
            yield f"{name}={json.dumps(text[name])}: only {values} is supported"
    heads = text.get("num_attention_heads")
    if text.get("num_key_value_heads", heads) not in (heads, None):
        yield (
            f"num_key_value_heads={text['num_key_value_heads']}: must equal "
            f"num_attention_heads={heads}; latent attention has no groups"
        )
    latent, norm = (
        text.get("routed_expert_hidden_size"),
        text.get("latent_moe_use_norm"),
    )
    if norm and latent is None:
        yield "latent_moe_use_norm=true: needs routed_expert_hidden_size"
    yield from _activation_problems(text)
    yield from _linear_problems(text)
    quantisation = _quantisation(outer, text)
    if quantisation:
        yield from _quantisation_problems(quantisation)


def _activation_problems(text: Mapping[str, Any]) -> Iterator[str]:
    act = text.get("hidden_act")
    if act not in ("situ", "silu", None):
        yield f"hidden_act={json.dumps(act)}: only situ or silu is supported"
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        if act == "situ" and text.get(name) is None:
            yield f"{name}: missing, but hidden_act is situ"


def _linear_problems(text: Mapping[str, Any]) -> Iterator[str]:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        return
    where = "linear_attn_config"
    for name in sorted(set(linear) - _LINEAR):
        yield f"{where}.{name}: unknown field"
    missing = _LINEAR - set(linear) - {"use_full_rank_gate", "gate_lower_bound"}
    if missing:
        yield from (f"{where}.{name}: missing" for name in sorted(missing))
        return
    layers, depth = (
        sorted(linear["full_attn_layers"] + linear["kda_layers"]),
        text.get("num_hidden_layers", 0),
    )
    if layers != list(range(1, depth + 1)):
        yield (
            f"{where}: full_attn_layers and kda_layers together must name each of the "
            f"layers 1 to {depth} once; they name {layers}"
        )


def _quantisation_problems(quantisation: Mapping[str, Any]) -> Iterator[str]:
    where = "quantization_config"
    found = quantisation.get("format")
    if quantisation.get("quant_method") != "compressed-tensors" or found != _FORMAT:
        yield (
            f"{where}: quant_method={quantisation.get('quant_method')}, "
            f"format={found}; only compressed-tensors, {_FORMAT} is supported"
        )
        return
    for group, values in (quantisation.get("config_groups") or {}).items():
        weights = values.get("weights") or {}
        for name, value in weights.items():
            if name in _WEIGHTS and value != _WEIGHTS[name] and value is not None:
                yield (
                    f"{where}.config_groups.{group}.weights.{name}={value}: only "
                    f"{_WEIGHTS[name]} is supported"
                )


def _values(outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a `config.Model`."""
    values = _choices(text) | {"vision": vision_config.values(outer)}
    named = text.get("dtype") or text.get("torch_dtype")
    values["dtype"] = "float32" if named == "float32" else "bfloat16"
    for published, ours in _DIRECT.items():
        section, _, field = ours.rpartition(".")
        value = text.get(published, _OPTIONAL.get(published))
        (values[section] if section else values)[field] = value
    values["moe"]["balancing"]["threshold_cap"] = min(
        2 * values["moe"]["num_active"], values["moe"]["num_experts"]
    )
    # No layer is of this kind; the schema wants the section all the same.
    values["gqa"] = {
        "num_heads": text["num_attention_heads"],
        "num_kv_heads": text["num_attention_heads"],
        "head_dim": text["v_head_dim"],
        "positions": "none",
        "rope_base": 10000.0,
        "block_size": 512,
    }
    return values


def _choices(text: Mapping[str, Any]) -> dict[str, Any]:
    """What is no plain copy, and what the release leaves to those who run it.

    The latter, such as tile sizes and how routers are balanced, changes no output.
    """
    linear = text["linear_attn_config"]
    full = set(linear["full_attn_layers"])
    depth, size = text["num_hidden_layers"], text.get("attn_res_block_size")
    bound, situ = linear.get("gate_lower_bound"), text["hidden_act"] == "situ"
    latent = text.get("routed_expert_hidden_size")
    return {
        "attention": tuple("mla" if i in full else "kda" for i in range(1, depth + 1)),
        "kda": {
            "num_heads": linear["num_heads"],
            "key_dim": linear["head_dim"],
            "value_dim": linear["head_dim"],
            "conv_width": linear["short_conv_kernel_size"],
            "gate": "softplus" if bound is None else "bounded",
            "gate_lower_bound": -5.0 if bound is None else bound,
            "gate_granularity": "channel",
            "gate_rank": linear["head_dim"],
            "output_gate": "full" if linear.get("use_full_rank_gate") else "low_rank",
            "chunk_size": 64,
            "residuals": "all",
            "implementation": None,
        },
        "mla": {
            "output_gate": bool(text.get("mla_use_output_gate")),
            "positions": "none",
            "rope_base": 10000.0,
            "latent_norm_eps": 1e-6,  # the released code's default, in no config
            "block_size": 512,
        },
        "ffn": {
            "activation": "situ" if situ else "swiglu",
            "situ_beta": text["activation_situ_beta"] if situ else 4.0,
            "situ_linear_beta": text["activation_situ_linear_beta"] if situ else 25.0,
        },
        "moe": {
            "latent_width": latent,
            "latent_norm": bool(text.get("latent_moe_use_norm")),
            "router_input": "full",
            "balancing": _balancing("sign" if bound is None else "quantile"),
            "implementation": None,
            "dispatch": "capacity",
            "capacity_factor": 1.25,
        },
        "residual": {
            "kind": "none" if size is None else "block_attention",
            "block_size": float(depth if size is None else size),
        },
    }


def _balancing(method: str) -> dict[str, Any]:
    """For whoever trains on: the releases say how they balanced, not how finely."""
    return {
        "method": method,
        "bins": 1000,
        "ema": 0.0,
        "step": 1e-3,
        "low": 0.25,
        "high": 0.75,
        "aux_weight": 1e-2,
    }


def publish(model: config.Model) -> dict[str, Any]:
    """The config.json of a model of ours, in the releases' fields.

    Raises:
      InteropError: the published code cannot express the model; says what.
    """
    problems = list(_unpublishable(model))
    if problems:
        raise InteropError(
            "the published code cannot express this model:\n  " + "\n  ".join(problems)
        )
    text = _publish_text(model)
    if model.vision is None:
        return text
    return vision_config.publish(model.vision, text)


def _publish_text(model: config.Model) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": model.dtype,
    }
    for published, ours in _DIRECT.items():
        section, _, field = ours.rpartition(".")
        text[published] = getattr(getattr(model, section) if section else model, field)
    kda, moe, situ = model.kda, model.moe, model.ffn.activation == "situ"
    attends = model.residual.kind == "block_attention"
    kinds = list(enumerate(config.attention_kinds(model), 1))
    linear: dict[str, Any] = {
        "head_dim": kda.key_dim,
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_width,
        "full_attn_layers": [i for i, kind in kinds if kind == "mla"],
        "kda_layers": [i for i, kind in kinds if kind == "kda"],
    }
    if kda.output_gate == "full":
        linear["use_full_rank_gate"] = True
    if kda.gate == "bounded":
        linear["gate_lower_bound"] = kda.gate_lower_bound
    return text | {
        "num_key_value_heads": model.mla.num_heads,
        "hidden_act": "situ" if situ else "silu",
        "activation_situ_beta": model.ffn.situ_beta if situ else None,
        "activation_situ_linear_beta": model.ffn.situ_linear_beta if situ else None,
        "mla_use_nope": True,
        "mla_use_output_gate": model.mla.output_gate,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_expert_hidden_size": moe.latent_width,
        "latent_moe_use_norm": moe.latent_norm,
        "attn_res_block_size": int(model.residual.block_size) if attends else None,
        "linear_attn_config": linear,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }


def _unpublishable(model: config.Model) -> Iterator[str]:
    kda, size = model.kda, model.residual.block_size
    wrong = {
        "attention: gqa layers": "gqa" in config.attention_kinds(model),
        "mla.positions=rope": model.mla.positions != "none",
        "mla.latent_norm_eps is not 1e-6": model.mla.latent_norm_eps != 1e-6,
        "kda.key_dim, value_dim and gate_rank differ": (
            not kda.key_dim == kda.value_dim == kda.gate_rank
        ),
        "kda.conv_width=none": kda.conv_width is None,
        "kda.gate_granularity=head": kda.gate_granularity != "channel",
        "kda.output_gate=none": kda.output_gate == "none",
        "moe.router_input=latent": model.moe.router_input != "full",
        "moe.balancing.method=quantile_threshold": (
            model.moe.balancing.method == "quantile_threshold"
        ),
        "residual.kind=additive": model.residual.kind == "additive",
        "residual.block_size is no whole number": (
            model.residual.kind == "block_attention" and size != int(size)
        ),
    }
    vision = model.vision
    if vision is not None and vision.rope_base != vision_config.ROPE_BASE:
        wrong[f"vision.rope_base is not {vision_config.ROPE_BASE}"] = True
    yield from (f"config.model.{what}" for what, found in wrong.items() if found)
