"""How fast the KDA kernels are on this card, next to XLA and to flash-linear-attention.

Question: how far is training and decoding with KDA from the card's floor, and from fla?
Command:  python -m experiments.bench --config=configs/bench_kda.py --workdir=runs/bench
Cost:     3 minutes on one H200, 60 GB of memory; with the peer, which tunes itself, a
          quarter of an hour and 80 GB.
Expect:   docs/kda_gpu.md holds a table; at 1 x 8192 tokens x 96 heads a forward and
          backward pass takes about half of the peer's time.
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.suite = "kda"
    # Batch, tokens, heads; widths of keys and values are 128, inputs bfloat16.
    config.shapes = (
        (1, 8192, 96),
        (8, 8192, 32),
        (1, 65536, 32),
        (1, 262144, 32),
        (1, 1048576, 8),
    )
    config.decode_batches = (1, 64, 256)
    config.decode_heads = 32
    config.implementations = ("triton", "xla")
    # Documents that fill the row of one shape, timed as well.
    config.packed_shape = (1, 8192, 96)
    config.packed = (1300, 547, 2048, 963, 271, 3063)
    # And each choice of `kda`'s residuals, timed and weighed.
    config.residuals_shape = (1, 8192, 96)
    # Each of our kernels alone.
    config.kernel_shapes = ((1, 8192, 96), (1, 65536, 32))
    # XLA keeps chunk tensors in float32, so it gets the shapes up to this many tokens
    # times heads.
    config.largest_xla = 1_000_000
    # Also time fla's chunk_kda, if torch and fla can be imported.
    config.peer = True
    config.width = 128
    config.calls = 10
    config.rounds = 5
    return config
