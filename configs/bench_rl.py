r"""What it takes to learn from trajectories of 128K tokens on one device.

Question: how long do the scoring pass and a step of the learner take on a long row, and
          how much memory, in pieces that carry states and as a whole?
Command:  python -m experiments.bench --config=configs/bench_rl.py \
              --workdir=runs/bench_rl
Cost:     two minutes on one H200; for a CPU shrink it: --config.length=4096
          --config.pieces=1024,0 --config.width=64 --config.layers=4
Expect:   the same loss and gradient; pieces take a fraction of the memory. On an H200
          pieces of 8,192 took 8.8 s a step and 7.2 GB (docs/rl_learning.md).
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.suite = "rl"
    config.length = 131_072  # tokens of a trajectory, one in each row
    config.rows = 1
    config.pieces = (8192, 0)  # tokens of a piece; 0: whole rows
    config.turn = 64  # tokens of a turn of the policy, and of the answer to it
    config.answer = 448
    # 113 M parameters.
    config.width = 1024
    config.layers = 8
    config.attention = ("kda*3", "mla")
    config.heads = 8
    config.head_dim = 128
    config.ffn_width = 2816
    config.dtype = "bfloat16"
    config.remat = "unit"
    config.steps = 2  # that are timed, after one that is not
    return config
