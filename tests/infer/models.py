"""Models with every kind of cache, as small as they compile fast."""

import numpy as np

from tests import tiny

# Two equal residual blocks of a KDA and an MLA layer, all with experts: both scans
# repeat, and little is compiled twice.
HYBRID = (
    "model.num_layers=4",
    "model.attention=kda,mla",
    "model.ffn.num_dense_layers=0",
    "model.residual.block_size=2",
)
# Rotated positions; latents wide enough that chunks of 11 tokens or more expand them.
ROTATED = (
    "model.num_layers=2",
    "model.attention=gqa,mla",
    "model.ffn.num_dense_layers=2",
    "model.residual.block_size=1",
    "model.gqa.positions=rope",
    "model.mla.positions=rope",
    "model.mla.kv_rank=32",
)


def hybrid(*overrides):
    return tiny.make(*HYBRID, *overrides)


def tokens(seed, *shape):
    drawn = np.random.default_rng(seed).integers(0, 256, shape)
    return drawn.astype(np.int32)
