"""FLOPs against counts by hand, the parameter tree, XLA and published sizes."""

import dataclasses
import math
import runpy

import jax
import jax.numpy as jnp
import pytest

from kimi_jax import accounting, canonical, config_io, flops, hardware
from kimi_jax.modules import transformer, vision
from pallas_kernels.kda import gates, reference
from tests import tiny
from tests.modules import vision_cases


def load(name):
    return config_io.from_dict(runpy.run_path(f"configs/{name}.py")["get_config"]())


def forward(model, seq_len, form="recurrence"):
    return {p.name: p.forward for p in flops.flop_parts(model, seq_len, form)}


def test_a_tiny_model_by_hand():
    """Width 16, 2 heads of 8, T = 32; layers KDA+MLP, KDA+MoE, MLA+MoE, twice."""
    model = tiny.make().model
    want = {
        # q, k, v, o, g: 5 x 16x2x8; conv: 3 x 16 channels x 4; beta: 16x2;
        # decay: 16x4 + 4x16. Times 4 layers, 2 FLOPs a pair.
        "KDA projections": 2 * 4 * (5 * 256 + 192 + 32 + 128),
        # 2 heads; decay 64, recall 128, write 128, read 128.
        "KDA operation": 4 * 2 * (64 + 128 + 128 + 128),
        # q: 16x8 + 8x2x12; kv: 16x12 + 8x2x16; g and o: 2 x 16x2x8.
        "MLA projections": 2 * 2 * (128 + 192 + 192 + 256 + 512),
        # 16.5 tokens on average, 12 for each key and 8 for each value, 2 heads.
        "MLA attention": 2 * 2 * 2 * (12 + 8) * 16.5,
        "dense FFN": 2 * 3 * 16 * 32,
        "router": 5 * 2 * 16 * 4,
        "latent projections": 5 * 2 * 2 * 16 * 8,
        "routed experts": 5 * 2 * 2 * 3 * 8 * 8,
        "shared experts": 5 * 2 * 3 * 16 * 8,
        # Blocks of 6 sublayers read 1, 2 x5 and 2, 3 x5 sources; the output reads 3.
        "residual mixing": 2 * 2 * 16 * (11 + 17 + 3),
        "unembedding": 2 * 16 * 272,
    }
    assert forward(model, 32) == want
    chunks = forward(model, 32, "chunks")
    # Per head and token: 6 x 64 with the state, 4 x 16 x 16 in the chunk, 16^2 / 3.
    assert chunks.pop("KDA operation") == pytest.approx(4 * 2 * (384 + 1024 + 256 / 3))
    assert chunks.items() <= want.items()
    train = tiny.make().train
    assert flops.step_flops(tiny.make()) == 4 * 32 * 3 * sum(want.values())
    assert (train.batch_size, train.seq_len) == (4, 32)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.attention=gqa,kda,mla", "model.mla.q_rank=none"),
        ("model.kda.output_gate=low_rank", "model.kda.gate_granularity=head"),
        ("model.kda.output_gate=none", "model.kda.conv_width=none"),
        ("model.moe.latent_width=none", "model.moe.latent_norm=false"),
        ("model.moe.router_input=latent", "model.mla.output_gate=false"),
        ("model.moe.num_shared=0", "model.ffn.num_dense_layers=0"),
    ],
)
def test_projections_are_twice_the_matrices_a_token_uses(overrides):
    """Two FLOPs for every active parameter of a product, read off the real tree."""
    model = tiny.make(*overrides).model
    assert sum(forward(model, 32).values()) - mixing(model, 32) == 2 * used(model)


@pytest.mark.parametrize("name", ["k3", "kimi_linear_48b"])
def test_training_is_six_flops_a_parameter_and_the_mixing_of_tokens(name):
    model = load(name).model
    active = sum(part.active for part in accounting.parameter_parts(model))
    total = flops.training_flops_per_token(model, 8192)
    products = total - flops.TRAINING * mixing(model, 8192)
    assert products == 6 * used(model)
    assert products == pytest.approx(6 * active, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "total", "attention", "kda"),
    [
        # 6 x 104.18 B + 24 layers x 96 heads x 320 x 2 x 4096.5 x 3
        # + 69 layers x 96 heads x 7 x 128^2 x 3 + 1,003 sources x 4 x 7168 x 3.
        ("k3", 645.593e9, 18.1216e9, 2.27908e9),
        # 6 x 3.1068 B + 7 MLA and 20 KDA layers of 32 heads.
        ("kimi_linear_48b", 20.6225e9, 1.76182e9, 0.220201e9),
    ],
)
def test_published_models_at_8k(name, total, attention, kda):
    model = load(name).model
    parts = {p.name: p.training for p in flops.flop_parts(model, 8192)}
    assert flops.training_flops_per_token(model, 8192) == pytest.approx(total, rel=1e-5)
    assert parts["MLA attention"] == pytest.approx(attention, rel=1e-5)
    assert parts["KDA operation"] == pytest.approx(kda, rel=1e-5)
    longer = {p.name: p.training for p in flops.flop_parts(model, 16384)}
    assert longer.pop("MLA attention") / parts.pop("MLA attention") == pytest.approx(
        16385 / 8193
    )
    assert longer == parts


def test_a_tower_costs_two_flops_a_parameter_and_patch_and_its_attention():
    cfg = vision_cases.make("train.row_patches=16")
    model, per_merged = cfg.model, ("project_in", "project_out")
    params = jax.eval_shape(lambda: vision.init(model, jax.random.key(0)))
    want = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = canonical.path_name(path).rsplit("/", 1)[-1]
        if "norm" not in name and name != "position":
            want += 2 * math.prod(leaf.shape) * (4 if name in per_merged else 16)
    attention = 2 * (2 * 2 * 16 * 16 * 16)  # layers, products, width, patches
    assert flops.vision_flops(model, 16) == want + attention
    text = dataclasses.replace(cfg, model=dataclasses.replace(model, vision=None))
    row = flops.step_flops(cfg) - flops.step_flops(text)
    assert row == cfg.train.batch_size * 3 * (want + attention)


def test_the_delta_rule_costs_what_xla_counts():
    model = tiny.make("model.kda.key_dim=64", "model.kda.value_dim=32").model
    head = {"state": (1, 2, 64, 32), "key": (1, 2, 64), "value": (1, 2, 32)}
    state, key, value = (jnp.zeros(shape) for shape in head.values())
    token = gates.Prepared(q=key, k=key, v=value, g=key, beta=jnp.zeros((1, 2)))
    counted = jax.jit(reference.update).lower(state, token).cost_analysis()
    ours = forward(model, 32)["KDA operation"] / 4
    # XLA also counts the product with beta and the difference before it.
    assert ours == 2 * 7 * 64 * 32 == counted["flops"] - 2 * 2 * 32


def test_peaks_by_device_kind():
    assert hardware.peak_flops("NVIDIA H200") == 989.5e12
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert hardware.peak_flops("NVIDIA H100 PCIe") == 756.5e12
    assert hardware.peak_flops("TPU v5 lite") == 197e12
    assert hardware.peak_flops("TPU v5") == 459e12
    assert hardware.peak_flops("TPU7x") == 1153.5e12
    for unknown in ("cpu", "NVIDIA H1000", "TPU v5 heavy", "TPU v4 lite"):
        assert hardware.peak_flops(unknown) is None


def mixing(model, seq_len):
    """Forward FLOPs that touch no matrix of parameters."""
    names = ("KDA operation", "MLA attention", "GQA attention", "residual mixing")
    parts = forward(model, seq_len)
    return sum(parts.get(name, 0) for name in names)


def used(model):
    """Parameters in products that a token uses."""
    shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["params"]):
        name = canonical.path_name(path)
        last = name.rsplit("/", 1)[-1]
        if last in ("embed", "query", "gain", "A_log", "dt_bias") or "norm" in last:
            continue
        share = 1.0
        if last.startswith("experts_"):
            share = model.moe.num_active / model.moe.num_experts
        total += share * math.prod(leaf.shape)
    return total
