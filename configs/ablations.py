r"""The claims of the papers at small scale, a row of docs/ablations.md each.

Question: does a mechanism do here what its paper says it does?
Command:  python -m experiments.sweep --config=configs/ablations.py:gate \
              --workdir=runs/ablations/gate --run=local:2     # then --collect
Cost:     at most 30 minutes a row on 2 CPU cores, all settings and seeds together; but
          hybrid, positions_far, balancing_896, residuals and residuals_steps are for
          a GPU (--run=local:15).
Expect:   docs/ablations.md.

Rows: gate, granularity, hybrid, positions, positions_far, balancing, balancing_896,
sensitivity, residuals, residuals_steps, latent, activation, muon. `:mqar` is the model
of recall that they change, `:text` that of text, and `:needle` the latter trained to
find a number in generated prose.
"""

from configs import common, mqar
from configs.hyper import chain, grid, product, seeds, zipped

SEEDS = 3
RECALL, TEXT, NEEDLE = (grid("arg", name) for name in ("mqar", "text", "needle"))
BOTH = grid("arg", "mqar", "text")
POSITIONS = grid("model.mla.positions", "none", "rope")
RESIDUALS = chain(
    grid("model.residual.kind", "none"), grid("model.residual.block_size", 2.0, 0.5)
)
FAR = {"train.eval_length_multiples": (1, 4, 16)}
METHODS = grid(
    "model.moe.balancing.method",
    "quantile",
    "quantile_exact",
    "load_quantile",
    "sign",
    "aux_loss",
    "none",
)


def get_config(arg=""):
    if arg == "mqar":
        config = mqar.get_config("pairs=8,length=32")
        config.train.update(steps=240, eval_every=20, checkpoint_every=240)
    elif arg in ("", "text", "needle") or arg in ROWS:
        config = _text()
        if arg == "needle":
            config.data.sources = ("task:needle:digits=3",)
            config.train.update(seq_len=256, steps=200, eval_every=20, eval_batches=8)
            config.train.checkpoint_every = 200
    else:
        names = ("mqar", "text", "needle", *ROWS)
        raise ValueError(f"argument {arg!r}: write {', '.join(names)}")
    config.name = f"ablation_{arg or 'text'}"
    return config


def get_hyper(arg=""):
    if arg not in ROWS:
        raise ValueError(f"argument {arg!r}: name a row, of {', '.join(ROWS)}")
    # Seeds outside: what the first compiles, a cache has for the others.
    return product(seeds(SEEDS), ROWS[arg]())


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
    tasks = grid("arg", "mqar", "text", "needle")
    return product(tasks, deep, grid("model.attention", *patterns))


def _positions():
    """Attention without positions reads on past the training length."""
    # At 256 tokens: at 1,024 this model has not learned it in as many steps.
    needle = {"train.eval_every": 100, "train.eval_batches": 2}
    tasks = chain(RECALL, product(NEEDLE, [needle | FAR]))
    return product(tasks, POSITIONS)


def _positions_far():
    """The same of text: trained on 1,024 tokens, read to 16,384."""
    long = {"train.seq_len": 1024, "train.batch_size": 8, "train.eval_batches": 8}
    return product(TEXT, [long | FAR | {"model.mla.block_size": 512}], POSITIONS)


def _balancing():
    """Quantile balancing is steadier than the others."""
    return product(TEXT, chain(_experts(16, 2), _experts(64, 4)), METHODS)


def _balancing_896():
    """The same with as many experts as Kimi K3 has."""
    return product(TEXT, _experts(896, 16), METHODS)


def _experts(count, active):
    return [{"model.moe.num_experts": count, "model.moe.num_active": active}]


def _sensitivity():
    """What balancers make of other values of their one dial; 64 experts."""
    name = "model.moe.balancing"
    dials = chain(
        *(
            product(grid(f"{name}.method", method), grid(f"{name}.{dial}", *values))
            for method, dial, values in (
                ("quantile", "ema", (0.5, 0.9)),
                ("load_quantile", "step", (3e-4, 1e-2)),
                ("sign", "step", (3e-4, 1e-2)),
                ("aux_loss", "aux_weight", (1e-3, 1e-1)),
            )
        )
    )
    return product(TEXT, _experts(64, 4), dials)


def _residuals():
    """Attention residuals help, and more so with depth; at equal compute."""
    # Reading all blocks costs FLOPs: at a depth, each kind spends as many in all.
    steps = {6: (250, 247, 242), 12: (250, 245, 236), 24: (250, 242, 224)}
    depths = (
        product(
            grid("model.num_layers", depth),
            zipped(RESIDUALS, grid("train.steps", *equal)),
        )
        for depth, equal in steps.items()
    )
    return product(TEXT, chain(*depths))


def _residuals_steps():
    """The same at equal steps."""
    return product(TEXT, grid("model.num_layers", 6, 12, 24), RESIDUALS)


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
    # With two heads there is little to tell apart.
    heads = [{"model.kda.num_heads": 8, "model.mla.num_heads": 8}]
    return product(TEXT, heads, kinds)


ROWS = {
    "gate": _gate,
    "granularity": _granularity,
    "hybrid": _hybrid,
    "positions": _positions,
    "positions_far": _positions_far,
    "balancing": _balancing,
    "balancing_896": _balancing_896,
    "sensitivity": _sensitivity,
    "residuals": _residuals,
    "residuals_steps": _residuals_steps,
    "latent": _latent,
    "activation": _activation,
    "muon": _muon,
}
