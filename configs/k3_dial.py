r"""One dial: K3 at any depth, with every mechanism and K3's ratios.

Question: how does a change behave as the model grows?
Command:  python -m experiments.train --config=configs/k3_dial.py:depth=4 \
              --workdir=runs/depth_4
Cost:     depth 2 is for a laptop, 12 for a node, 93 is K3 itself.
          `experiments.doctor` with the same --config prints the parameters.
Expect:   at depth 93 the model of configs/k3.py.

Width, heads, experts, ranks and residual blocks grow in proportion to depth. Tokens,
batch and learning rate are power laws through the rows of the Attention Residuals
report at 12 and 17 layers (38.7 B and 119 B tokens, 1.57 M and 3.54 M tokens a batch,
2.99e-3 and 2.02e-3); outside of that range they are extrapolations.
"""

from configs import common

DEPTH, WIDTH = 93, 7168  # of K3


def get_config(arg: str = "depth=12"):
    depth = common.parse_arg(arg, depth=12)["depth"]
    if depth < 2:
        raise ValueError(f"depth={depth}: at least 2, so that KDA and MLA both occur")

    def scaled(k3_size: int, multiple: int = 1) -> int:
        """A size of K3 in proportion to depth, rounded to a multiple."""
        return max(multiple, round(k3_size * depth / DEPTH / multiple) * multiple)

    config = common.base()
    config.name = f"k3_dial_depth_{depth}"
    model = config.model
    model.num_layers = depth
    model.width = scaled(WIDTH, 64)
    pattern = ("kda", "kda", "kda", "mla") * depth
    model.attention = (*pattern[: depth - 1], "mla")  # the last layer is MLA, as in K3
    heads = scaled(96)
    model.kda.update(
        num_heads=heads, key_dim=128, value_dim=128, gate_rank=128, chunk_size=64
    )
    model.mla.update(
        num_heads=heads,
        q_rank=scaled(1536, 32),
        kv_rank=scaled(512, 32),
        nope_dim=128,
        pe_dim=64,
        value_dim=128,
        block_size=512,
    )
    model.gqa.update(num_heads=heads, num_kv_heads=1, head_dim=128)
    model.ffn.width = scaled(33792, 64)
    active = max(2, scaled(16))
    model.moe.update(
        num_experts=scaled(896, 16),
        num_active=active,
        expert_width=scaled(3072, 32),
        latent_width=scaled(3584, 32),
    )
    model.moe.balancing.threshold_cap = 2 * active
    model.residual.block_size = float(scaled(12))
    growth = depth / 12
    tokens = 38.7e9 * growth**3.2
    seq_len = 8192
    batch = max(1, round(1.57e6 * growth**2.3 / seq_len))
    config.optimizer.learning_rate = 2.99e-3 * growth**-1.12
    config.train.update(
        steps=max(1, round(tokens / (batch * seq_len))),
        batch_size=batch,
        seq_len=seq_len,
        remat="nested",
        eval_batches=2,
        eval_length_multiples=(1, 4),
    )
    return config
