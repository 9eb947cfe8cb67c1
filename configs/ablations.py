r"""The claims of the papers at small scale, a row of docs/ablations.md each.

Question: does a mechanism do here what its paper says it does?
Command:  python -m experiments.sweep --config=configs/ablations.py:gate \
              --workdir=runs/ablations/gate --run=local:2     # then --collect
Cost:     at most 30 minutes a row on 2 CPU cores, all settings and seeds together; but
          hybrid and residuals, of deep models, 2 to 3 hours.
Expect:   docs/ablations.md.

Rows: gate, granularity, hybrid, positions, balancing, residuals, latent, activation,
muon. `:mqar` is the model of recall that they change, and `:text` that of text.
"""

from configs import common, mqar
from configs.hyper import chain, grid, product, seeds

SEEDS = 3
RECALL, TEXT = grid("arg", "mqar"), grid("arg", "text")
BOTH = grid("arg", "mqar", "text")


def get_config(arg=""):
    if arg == "mqar":
        config = mqar.get_config("pairs=8,length=32")
        config.train.update(steps=240, eval_every=20, checkpoint_every=240)
    elif arg in ("", "text") or arg in ROWS:
        config = _text()
    else:
        raise ValueError(
            f"argument {arg!r}: write {', '.join(('mqar', 'text', *ROWS))}"
        )
    config.name = f"ablation_{arg or 'text'}"
    return config


def get_hyper(arg=""):
    if arg not in ROWS:
        raise ValueError(f"argument {arg!r}: name a row, of {', '.join(ROWS)}")
    return product(ROWS[arg](), seeds(SEEDS))


def _text():
    """Shakespeare; one layer of each kind of attention and of each kind of FFN."""
    config = common.base()
    model = config.model
    model.update(width=64, num_layers=2, attention=("kda", "mla"))
    model.kda.update(num_heads=2, gate_rank=16)
    model.mla.update(num_heads=2, q_rank=32)
    model.ffn.width = 192
    model.moe.update(expert_width=32, latent_width=32)
    config.optimizer.learning_rate = 5e-3
    config.train.update(
        steps=250,
        seq_len=128,
        eval_every=50,
        eval_batches=16,
        eval_length_multiples=(1, 4),
        checkpoint_every=250,
    )
    return config


def _gate():
    """Bounded decay costs no quality."""
    gates = chain(
        [{"model.kda.gate_lower_bound": -5.0}],
        [{"model.kda.gate_lower_bound": -1.0}],
        [{"model.kda.gate": "softplus"}],
    )
    return product(BOTH, gates)


def _granularity():
    """A decay for each channel beats one for each head."""
    tasks = chain(
        RECALL,
        [
            {
                "arg": "mqar",
                "data.sources": ("task:palindrome:items=12:symbols=63",),
                "train.seq_len": 24,
            }
        ],
        TEXT,
    )
    return product(tasks, grid("model.kda.gate_granularity", "channel", "head"))


def _hybrid():
    """Three KDA layers to one of MLA are the best mixture."""
    patterns = (("mla",), ("kda", "mla"), ("kda*3", "mla"), ("kda*7", "mla"), ("kda",))
    deep = grid("model.num_layers", 8)
    return product(BOTH, deep, grid("model.attention", *patterns))


def _positions():
    """Attention without positions reads on past the training length."""
    return product(BOTH, grid("model.mla.positions", "none", "rope"))


def _balancing():
    """Quantile balancing is steadier than the others, at any number of experts."""
    methods = (
        "quantile",
        "quantile_exact",
        "load_quantile",
        "sign",
        "aux_loss",
        "none",
    )
    sizes = [
        {"model.moe.num_experts": experts, "model.moe.num_active": active}
        for experts, active in ((16, 2), (64, 4), (896, 16))
    ]
    return product(TEXT, chain(sizes), grid("model.moe.balancing.method", *methods))


def _residuals():
    """Attention residuals help, and more so with depth."""
    kinds = chain(
        grid("model.residual.kind", "none"),
        grid("model.residual.block_size", 2.0, 0.5),
    )
    return product(TEXT, grid("model.num_layers", 6, 12, 24), kinds)


def _latent():
    """Latent experts buy quality for each byte that travels.

    Widths of experts are such that an active expert costs the same FLOPs in all.
    """
    none = {"model.moe.latent_width": None, "model.moe.latent_norm": False}
    sizes = (
        none | {"model.moe.expert_width": 32},
        {"model.moe.latent_width": 32, "model.moe.expert_width": 64},
        {"model.moe.latent_width": 16, "model.moe.expert_width": 128},
    )
    return product(TEXT, chain(sizes))


def _activation():
    """SiTU keeps activations bounded where the learning rate is high."""
    return product(
        TEXT,
        grid("optimizer.learning_rate", 5e-3, 2e-2),
        grid("model.ffn.activation", "situ", "swiglu"),
    )


def _muon():
    """One orthogonalisation for each head, against whole matrices and AdamW."""
    kinds = chain(
        grid("optimizer.muon_per_head", True, False), grid("optimizer.kind", "adamw")
    )
    return product(TEXT, kinds)


ROWS = {
    "gate": _gate,
    "granularity": _granularity,
    "hybrid": _hybrid,
    "positions": _positions,
    "balancing": _balancing,
    "residuals": _residuals,
    "latent": _latent,
    "activation": _activation,
    "muon": _muon,
}
