r"""Kimi K3's context curriculum: 8K, 64K, 256K, 1M tokens, on 4,096 devices.

Question: how is K3 carried from 8K to 1M tokens of context?
Command:  python -m experiments.curriculum --config=configs/curriculum_k3.py \
              --workdir=DIR --list      # then experiments.aot with what it prints
Cost:     the command allocates nothing and takes seconds; training needs a pod.
Expect:   four stages, 8K and 64K as pre-training, 256K and 1M as the cool-down.

The lengths, their order and the absence of positions are K3's (report Sec. 2.5). It
does not publish tokens, batches, rates or shares: those below are placeholders of the
usual size. Every stage has 16.8 million tokens a step and a mesh of its own, those of
configs/k3.py; the sources must hold documents of the last stage's length.
"""

from configs import k3


def get_config():
    return k3.get_config()


def get_stages():
    return [
        _stage(8_192, 12_000_000_000_000, 2e-4),
        _stage(65_536, 2_000_000_000_000, 1.5e-4),
        _stage(262_144, 400_000_000_000, 8e-5),
        _stage(1_048_576, 200_000_000_000, 4e-5) | {"optimizer.final_fraction": 0.0},
    ]


def _stage(length, tokens, rate):
    rows, micro_batches, mesh = k3.STAGES[length]
    batch = rows * length
    return {
        "length": length,
        "tokens": tokens,
        "batch_tokens": batch,
        "until": {"position_gap": 0.0},
        "optimizer.learning_rate": rate,
        "optimizer.final_fraction": 1.0,
        "train.micro_batches": micro_batches,
        "train.eval_every": 1000,
        "train.checkpoint_every": 1000,
        **({"long_share": 0.5} if length > 8_192 else {}),
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
    }
