"""How much arithmetic a model needs, by part.

A multiply and an add are two FLOPs. Counted is what the model is defined by: matrix
products, the attention of every token to the tokens before it, the delta rule of KDA,
the mixture over depth. Norms, activations, gates and the softmax are left out, and so
is whatever an implementation does besides: forward passes that `train.remat` repeats,
masked halves, padding of experts. Model FLOP utilisation by this count therefore
rises only when steps take less time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kimi_jax import layout
from kimi_jax.config import Config, Model, attention_kinds, ffn_kinds

# The backward pass of a product is two products of its size.
TRAINING = 3

KDAForm = Literal["recurrence", "chunks"]


class Part(NamedTuple):
    """FLOPs a token of one part of the model."""

    name: str
    forward: float

    @property
    def training(self) -> float:
        """Forward and backward pass."""
        return TRAINING * self.forward


def flop_parts(
    model: Model, seq_len: int, kda_form: KDAForm = "recurrence"
) -> list[Part]:
    """FLOPs a token by part, in reading order; parts that the model lacks are left out.

    Args:
      seq_len: T, tokens of a document; a token attends to (T + 1) / 2 on average.
      kda_form: how the KDA operation is counted: by the recurrence, which is the least
        that any implementation does, or as products over chunks of `kda.chunk_size`.
    """
    kinds = attention_kinds(model) + ffn_kinds(model)
    count = {kind: kinds.count(kind) for kind in ("kda", "mla", "gqa", "mlp", "moe")}
    mla, gqa, moe, D = model.mla, model.gqa, model.moe, model.width
    context = (seq_len + 1) / 2
    mla_pair = mla.num_heads * (mla.nope_dim + mla.pe_dim + mla.value_dim)
    gqa_pair = gqa.num_heads * 2 * gqa.head_dim
    expert_in = moe.latent_width or D
    router_in = expert_in if moe.router_input == "latent" else D
    latent = 0 if moe.latent_width is None else 2 * D * moe.latent_width
    products = {
        "KDA projections": count["kda"] * _kda_projections(model),
        "KDA operation": count["kda"] * _kda_operation(model, kda_form),
        "MLA projections": count["mla"] * _mla_projections(model),
        "MLA attention": count["mla"] * mla_pair * context,
        "GQA projections": count["gqa"] * _gqa_projections(model),
        "GQA attention": count["gqa"] * gqa_pair * context,
        "dense FFN": count["mlp"] * 3 * D * model.ffn.width,
        "router": count["moe"] * router_in * moe.num_experts,
        "latent projections": count["moe"] * latent,
        "routed experts": count["moe"]
        * (moe.num_active * 3 * expert_in * moe.expert_width),
        "shared experts": count["moe"] * 3 * D * moe.num_shared * moe.expert_width,
        "residual mixing": _residual_mixing(model),
        "unembedding": D * model.vocab_size,
    }
    return [Part(name, 2.0 * n) for name, n in products.items() if n]


def training_flops_per_token(model: Model, seq_len: int) -> float:
    """FLOPs of training on one token: all parts, forward and backward."""
    return sum(part.training for part in flop_parts(model, seq_len))


def step_flops(cfg: Config) -> float:
    """FLOPs of one training step, over all devices.

    As if every row were one document, and its patches one image: shorter ones attend to
    fewer tokens, and padding is counted as text and as patches.
    """
    train = cfg.train
    per_token = training_flops_per_token(cfg.model, train.seq_len)
    images = TRAINING * vision_flops(cfg.model, train.row_patches)
    return train.batch_size * (train.seq_len * per_token + images)


def vision_flops(model: Model, patches: int) -> float:
    """Forward FLOPs of tower and projector on one item of so many patches."""
    vision = model.vision
    if vision is None:
        return 0.0
    D, HK = vision.width, vision.num_heads * vision.head_dim
    merged = vision.merge**2 * D
    layer = 4 * D * HK + 2 * D * vision.mlp_width + 2 * HK * patches
    tower = 3 * vision.patch_size**2 * D + vision.num_layers * layer
    projector = merged * (merged + model.width) / vision.merge**2
    return 2.0 * patches * (tower + projector)


# Below, pairs of a multiply and an add.


def _kda_projections(model: Model) -> int:
    kda, D = model.kda, model.width
    H, K, V, R = kda.num_heads, kda.key_dim, kda.value_dim, kda.gate_rank
    qkv = D * H * (2 * K + V)
    conv = (kda.conv_width or 0) * H * (2 * K + V)
    decay = D * R + R * H * (1 if kda.gate_granularity == "head" else K)
    gate = {"full": D * H * V, "low_rank": D * R + R * H * V, "none": 0}
    return qkv + conv + D * H + decay + gate[kda.output_gate] + H * V * D


def _kda_operation(model: Model, form: KDAForm) -> float:
    """By the recurrence, of a K x V state: decay (one multiply), recall, write, read.

    By chunks of C tokens, a token's share: three products with the state; rows of
    k k^T and q k^T (K each) and of what they are applied to (V each); and a
    triangular inverse of C^3 / 6 pairs a chunk.
    """
    kda = model.kda
    K, V, C = kda.key_dim, kda.value_dim, kda.chunk_size
    if form == "recurrence":
        return kda.num_heads * 3.5 * K * V
    return kda.num_heads * (3 * K * V + 2 * C * (K + V) + C * C / 6)


def _mla_projections(model: Model) -> int:
    mla, D = model.mla, model.width
    H, V, R = mla.num_heads, mla.value_dim, mla.kv_rank
    K = mla.nope_dim + mla.pe_dim
    queries = D * H * K if mla.q_rank is None else mla.q_rank * (D + H * K)
    keys_values = D * (R + mla.pe_dim) + R * H * (mla.nope_dim + V)
    return queries + keys_values + (1 + mla.output_gate) * D * H * V


def _gqa_projections(model: Model) -> int:
    gqa = model.gqa
    return 2 * model.width * gqa.head_dim * (gqa.num_heads + gqa.num_kv_heads)


def _residual_mixing(model: Model) -> int:
    """Every source of every sublayer, and of the output, is scored and added up."""
    if model.residual.kind != "block_attention":
        return 0
    size = layout.block_sublayers(model)
    sources = 0
    for sublayer in range(2 * model.num_layers):
        block, place = divmod(sublayer, size)
        # The embedding, the blocks before, and what this block has added up so far.
        sources += 1 + block + (place > 0)
    output = 1 + layout.num_blocks(model)
    return 2 * model.width * (sources + output)
