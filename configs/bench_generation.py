"""What a token costs after a long context, and what forking a long prefix costs.

Question: how do decoding, reading and forking grow with the context, layer by layer?
Command:  python -m experiments.bench --config=configs/bench_generation.py \
              --workdir=runs/bench
Cost:     4 minutes on 2 CPU cores, under 2 GB of memory.
Expect:   KDA alone costs the same at 1K and at 1M tokens; one MLA layer in four adds a
          part that is proportional to the context. docs/generation.md has the table.
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.suite = "generation"
    # Patterns of attention layers, in a model of 4 layers. Reading skips the attention
    # of a last layer, which no later token needs.
    config.patterns = ("kda*2,mla,kda", "kda")
    config.model = ()  # overrides of its fields
    # Tokens that are in the cache already when the cost of the next ones is measured.
    # (): measure the forks alone.
    config.contexts = (1024, 16384, 262144, 1048576)
    config.chunk = 512  # tokens read in one call
    config.steps = 16  # tokens decoded in one call
    config.rounds = 3
    config.prefix = 65536  # tokens of the prefix that is forked
    config.forks = 16
    return config
