"""The table of names: our canonical arrays, and the tensors of the releases.

One list, read in both directions. Linear [out, in] there is [in, out] here, heads are
axes of their own here, and what the releases keep apart by expert is one array here
(`kimi_jax.interop.entries`). A vision tower adds the entries of
`kimi_jax.interop.vision_names`.

Routed experts may be packed (MXFP4). Which form a tensor has is decided by the names
that are present: `packed` turns an entry for `X.weight` into the two for
`X.weight_packed` and `X.weight_scale`, whose bytes are kept as they are.

Source: the index of the released checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from kimi_jax import config
from kimi_jax.interop.entries import Entry, linear, plain, stack

PACKED = "packed"  # the collection of arrays that are kept in MXFP4
GROUP = 32  # inputs that share a scale
_A_LOG_MULTIPLE = 128  # the bounded gate's A_log is stored padded to this


def text_entries(model: config.Model, prefix: str = "") -> list[Entry]:
    """Every array of a language model, unpacked, in the order of the forward pass.

    Args:
      prefix: of published names, "language_model." beside a vision tower.
    """
    root = f"{prefix}model."
    D, W = model.width, model.vocab_size
    entries = [plain("params/embedding/embed", f"{root}embed_tokens.weight", (W, D))]
    kinds = zip(config.attention_kinds(model), config.ffn_kinds(model), strict=True)
    for i, (attention, ffn) in enumerate(kinds):
        ours, theirs = f"layer_{i:03d}", f"{root}layers.{i}."
        entries += _residual(
            model, f"params/{ours}/attention", f"{theirs}self_attention"
        )
        entries += [_gain(model, ours, "attention", f"{theirs}input_layernorm")]
        entries += (_kda if attention == "kda" else _mla)(
            model, f"params/{ours}/attention/{attention}/", f"{theirs}self_attn."
        )
        entries += _residual(model, f"params/{ours}/ffn", f"{theirs}mlp")
        entries += [_gain(model, ours, "ffn", f"{theirs}post_attention_layernorm")]
        if ffn == "mlp":
            ffn_name, where = f"params/{ours}/ffn/mlp/", f"{theirs}mlp."
            entries += _mlp(ffn_name, where, D, model.ffn.width)
        else:
            entries += _moe(model, f"{ours}/ffn/moe/", f"{theirs}block_sparse_moe.")
    entries += _residual(model, "params/output", f"{root}output_attn")
    entries += [plain("params/output/norm", f"{root}norm.weight", (D,))]
    return [
        *entries,
        linear("params/output/unembed", f"{prefix}lm_head.weight", (W,), (D,)),
    ]


def packed(entry: Entry) -> tuple[Entry, Entry]:
    """The codes and the scales of an entry that is stored in MXFP4.

    Codes [out, in / 2] hold the value of an even input in the low half of a byte;
    scales [out, in / 32] are exponents. Both stay in the published order.
    """
    out, into = entry.stored
    made = []
    for part, width, suffix in (("codes", 2, "packed"), ("scales", GROUP, "scale")):
        names = tuple(f"{name}_{suffix}" for name in entry.published)
        like = plain(
            f"{PACKED}/{entry.name.partition('/')[2]}/{part}",
            names[0],
            (out, into // width),
        )
        made.append(stack(like, names))
    return made[0], made[1]


def can_pack(entry: Entry) -> bool:
    """Whether the releases quantise it: routed experts alone."""
    return entry.name.rpartition("/")[2].startswith("experts_")


def _gain(model: config.Model, layer: str, part: str, published: str) -> Entry:
    return plain(f"params/{layer}/{part}/norm", f"{published}.weight", (model.width,))


def _residual(model: config.Model, name: str, published: str) -> Iterator[Entry]:
    """Query and gain of one depth attention, if there is one."""
    if model.residual.kind == "block_attention":
        D = (model.width,)
        query, gain = f"{name}/residual/query", f"{name}/residual/gain"
        yield plain(query, f"{published}_res_proj.weight", D, (1, *D))
        yield plain(gain, f"{published}_res_norm.weight", D)


def _kda(model: config.Model, name: str, published: str) -> Iterator[Entry]:
    cfg, D = model.kda, (model.width,)
    H, R = cfg.num_heads, (cfg.gate_rank,)
    per_head = {"q": cfg.key_dim, "k": cfg.key_dim, "v": cfg.value_dim}
    for part, size in per_head.items():
        yield linear(f"{name}{part}", f"{published}{part}_proj.weight", (H, size), D)
    for part, size in per_head.items():
        if cfg.conv_width is not None:
            W = cfg.conv_width
            theirs, stored = f"{published}{part}_conv1d.weight", (H * size, 1, W)
            ours = f"{name}{part}_conv"
            yield plain(ours, theirs, (H, size, W), stored, precise=True)
    yield linear(f"{name}f_a", f"{published}f_a_proj.weight", R, D)
    yield linear(f"{name}f_b", f"{published}f_b_proj.weight", (H, cfg.key_dim), R)
    shape = (H, cfg.key_dim)
    stored = (H * cfg.key_dim,)
    yield plain(f"{name}dt_bias", f"{published}dt_bias", shape, stored, precise=True)
    stored = (-(-H // _A_LOG_MULTIPLE) * _A_LOG_MULTIPLE,)
    if cfg.gate == "softplus":
        stored = (1, 1, H, 1)
    yield plain(f"{name}A_log", f"{published}A_log", (H,), stored, precise=True)
    yield linear(f"{name}beta", f"{published}b_proj.weight", (H,), D)
    V = cfg.value_dim
    if cfg.output_gate == "full":
        yield linear(f"{name}g", f"{published}g_proj.weight", (H, V), D)
    elif cfg.output_gate == "low_rank":
        yield linear(f"{name}g_a", f"{published}g_a_proj.weight", R, D)
        yield linear(f"{name}g_b", f"{published}g_b_proj.weight", (H, V), R)
    yield plain(f"{name}o_norm", f"{published}o_norm.weight", (V,), precise=True)
    yield linear(f"{name}o", f"{published}o_proj.weight", D, (H, V))


def _mla(model: config.Model, name: str, published: str) -> Iterator[Entry]:
    cfg, D = model.mla, (model.width,)
    H, V, R = cfg.num_heads, cfg.value_dim, (cfg.kv_rank,)
    heads = (H, cfg.nope_dim + cfg.pe_dim)
    if cfg.q_rank is None:
        yield linear(f"{name}q", f"{published}q_proj.weight", heads, D)
    else:
        rank = (cfg.q_rank,)
        yield linear(f"{name}q_a", f"{published}q_a_proj.weight", rank, D)
        yield plain(f"{name}q_a_norm", f"{published}q_a_layernorm.weight", rank)
        yield linear(f"{name}q_b", f"{published}q_b_proj.weight", heads, rank)
    kv_a = (cfg.kv_rank + cfg.pe_dim,)
    yield linear(f"{name}kv_a", f"{published}kv_a_proj_with_mqa.weight", kv_a, D)
    yield plain(f"{name}kv_a_norm", f"{published}kv_a_layernorm.weight", R)
    kv_b = (H, cfg.nope_dim + V)
    yield linear(f"{name}kv_b", f"{published}kv_b_proj.weight", kv_b, R)
    if cfg.output_gate:
        yield linear(f"{name}g", f"{published}g_proj.weight", (H, V), D)
    yield linear(f"{name}o", f"{published}o_proj.weight", D, (H, V))


def _mlp(name: str, published: str, D: int, F: int) -> Iterator[Entry]:
    yield linear(f"{name}gate", f"{published}gate_proj.weight", (F,), (D,))
    yield linear(f"{name}up", f"{published}up_proj.weight", (F,), (D,))
    yield linear(f"{name}down", f"{published}down_proj.weight", (D,), (F,))


def _moe(model: config.Model, tail: str, published: str) -> Iterator[Entry]:
    moe, D = model.moe, (model.width,)
    E, F, name = moe.num_experts, (moe.expert_width,), f"params/{tail}"
    L = D if moe.latent_width is None else (moe.latent_width,)
    router = D if moe.router_input == "full" else L
    yield linear(f"{name}router", f"{published}gate.weight", (E,), router)
    bias = f"{published}gate.e_score_correction_bias"
    yield plain(f"balance/{tail}bias", bias, (E,), precise=True)
    if moe.latent_width is not None:
        down = f"{published}routed_expert_down_proj.weight"
        yield linear(f"{name}latent_down", down, L, D)
    for ours, theirs, out, into in (
        ("gate", "w1", F, L),
        ("up", "w3", F, L),
        ("down", "w2", L, F),
    ):
        names = tuple(f"{published}experts.{e}.{theirs}.weight" for e in range(E))
        yield stack(linear(f"{name}experts_{ours}", names[0], out, into), names)
    if moe.latent_norm:
        yield plain(f"{name}latent_norm", f"{published}routed_expert_norm.weight", L)
    if moe.latent_width is not None:
        up = f"{published}routed_expert_up_proj.weight"
        yield linear(f"{name}latent_up", up, D, L)
    if moe.num_shared:
        width = moe.num_shared * moe.expert_width
        where = f"{published}shared_experts."
        yield from _mlp(f"{name}shared/", where, model.width, width)
