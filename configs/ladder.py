r"""A scaling ladder: K3's dial at growing depths, tokens in proportion to the model.

Question: what does a change gain in compute, and does the gain grow with the model?
Command:  python -m experiments.sweep --config=configs/ladder.py \
              --workdir=runs/ladder --run=local:1     # then --collect
Cost:     12 runs of a dial with heads of 32, depths 2 to 4, on the default corpus.
Expect:   a law for each line, and how much more compute the base needs.

`configs/ladder.py:gpu` lists depths 4 to 12 with K3's heads of 128, 8,192 tokens a row
and 20 tokens for an active parameter. A rung alone is, for example,
`configs/ladder.py:depth=6,length=8192,per_parameter=20,divide=1`; `divide` makes widths
and heads of the dial that many times smaller.

Depth alone sets the tokens: the settings of a rung read the same tokens in the same
batches, and --collect counts the FLOPs that each of them spends.
"""

from configs import common, k3_dial
from configs.hyper import chain, grid, product, seeds

# What makes compute grow: the argument of get_config.
LADDER = ("arg",)

SIZES = {
    "": ((2, 3, 4), "length=256,per_parameter=2,divide=4"),
    "gpu": ((4, 6, 8, 10, 12), "length=8192,per_parameter=20,divide=1"),
}


def get_hyper(arg=""):
    if arg not in SIZES:
        raise ValueError(f"argument {arg!r}: leave it out, or write gpu")
    depths, size = SIZES[arg]
    return product(
        # The base comes first: the others are measured against it.
        chain(
            grid("model.residual.kind", "none"),
            grid("model.residual.kind", "block_attention"),
        ),
        grid("arg", *(f"depth={depth},{size}" for depth in depths)),
        seeds(2),
    )


def get_config(arg=""):
    values = common.parse_arg(arg, depth=2, length=256, per_parameter=2, divide=4)
    depth, length = values["depth"], values["length"]
    config = k3_dial.get_config(f"depth={depth}")
    config.name = "ladder"
    _shrink(config.model, values["divide"])
    tokens = values["per_parameter"] * active_parameters(config.model)
    # Rows grow with the root of the tokens, and so do steps.
    rows = max(2, round((tokens / length) ** 0.5 / 6))
    steps = max(20, round(tokens / (rows * length)))
    config.train.update(
        seq_len=length,
        batch_size=rows,
        steps=steps,
        eval_every=steps,
        checkpoint_every=steps,
        eval_length_multiples=(1,),
        eval_batches=-(-64 // rows),
    )
    # The dial's power law, which was fitted on deeper models, is too bold below them.
    config.optimizer.learning_rate = min(5e-3, config.optimizer.learning_rate)
    if length < 4096:  # short rows fit without recomputation
        config.train.remat = "none"
        config.model.kda.chunk_size = 16
        config.model.mla.block_size = 64
    return config


def active_parameters(model):
    """Of the matrices that a token is multiplied by; vectors are left out."""
    kda, mla, moe, width = model.kda, model.mla, model.moe, model.width
    softmax = sum(kind == "mla" for kind in model.attention)
    inner = kda.num_heads * kda.key_dim
    delta = 5 * width * inner + kda.gate_rank * (width + inner) + width * kda.num_heads
    head = mla.nope_dim + mla.pe_dim
    latent = (
        mla.q_rank * (width + mla.num_heads * head)
        + width * (mla.kv_rank + mla.pe_dim)
        + mla.kv_rank * mla.num_heads * (mla.nope_dim + mla.value_dim)
        + 2 * width * mla.num_heads * mla.value_dim
    )
    experts = 3 * moe.expert_width * (
        moe.num_active * moe.latent_width + moe.num_shared * width
    ) + width * (moe.num_experts + 2 * moe.latent_width)
    layers = (model.num_layers - softmax) * delta + softmax * latent
    dense = model.ffn.num_dense_layers
    ffns = dense * 3 * width * model.ffn.width + (model.num_layers - dense) * experts
    return layers + ffns + 2 * model.vocab_size * width


def _shrink(model, divide):
    """Makes all sizes that a token meets `divide` times smaller."""

    def less(section, *names, multiple):
        for name in names:
            size = section[name] / divide
            section[name] = max(multiple, round(size / multiple) * multiple)

    less(model, "width", multiple=16)
    less(model.kda, "key_dim", "value_dim", "gate_rank", multiple=16)
    less(model.mla, "q_rank", "kv_rank", "pe_dim", multiple=8)
    less(model.mla, "nope_dim", "value_dim", multiple=16)
    less(model.ffn, "width", multiple=16)
    less(model.moe, "expert_width", "latent_width", multiple=16)
