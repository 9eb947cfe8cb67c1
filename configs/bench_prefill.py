"""What it costs to read a million tokens, chunk after chunk.

Question: is reading linear in the length of the prompt, apart from softmax attention?
Command:  python -m experiments.bench --config=configs/bench_prefill.py \
              --workdir=runs/prefill
Cost:     25 minutes of CPU time, 24 of them the MLA layer's; under 1 GB of memory.
Expect:   with KDA alone a chunk costs the same at every depth; one MLA layer in four
          adds a part that is proportional to the tokens before it. docs/generation.md
          has the table and the figure.
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.suite = "prefill"
    # Patterns of attention layers, in a model of 4 layers. Reading skips the attention
    # of a last layer, which no later token needs.
    config.patterns = ("kda", "kda*2,mla,kda")
    # Where the cost of a chunk is told; the longest is the prompt that is read.
    config.contexts = (16384, 65536, 262144, 1048576)
    config.chunk = 2048  # tokens read in one call
    # Fields of the model that differ from the generation bench's: one narrow MLA head,
    # whose 5e11 pairs of tokens are most of the time.
    config.model = (
        "model.mla.num_heads=1",
        "model.mla.kv_rank=4",
        "model.mla.nope_dim=4",
        "model.mla.pe_dim=4",
        "model.mla.value_dim=4",
        "model.mla.block_size=512",
    )
    config.steps = 1
    return config
