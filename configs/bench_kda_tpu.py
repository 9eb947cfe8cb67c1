"""What the TPU compiler makes of the KDA kernels, next to tokamax's; no TPU is needed.

Question: how many cycles and bytes does a call cost at least, on every generation?
Command:  python -m experiments.bench --config=configs/bench_kda_tpu.py \
              --workdir=runs/bench_tpu
Cost:     2 minutes of one core for ours, 30 more with tokamax 0.0.17 installed.
Expect:   docs/kda_tpu.md holds a table.
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.suite = "kda_tpu_static"
    config.generations = ("v5e", "v5p", "v6e", "tpu7x")
    # Batch, tokens, heads; widths of keys and values are 128, inputs bfloat16.
    config.shapes = ((1, 8192, 32),)
    config.width = 128
    # Documents that the peer's packed call allows for; 0 leaves packed calls out.
    config.segments = 25
    # Also compile tokamax's kernels, if tokamax can be imported.
    config.peer = True
    # Where there is a TPU, also timed: documents that fill a row, choices of residuals.
    # And calls between two looks at the clock, and how often.
    config.packed_shape = (1, 8192, 32)
    config.packed = (1300, 547, 2048, 963, 271, 3063)
    config.residuals_shape = (1, 8192, 32)
    config.calls = 10
    config.rounds = 5
    return config
