"""Prefill: what each chunk of one long prompt costs, at every depth of the prompt.

The prompt is read whole, chunk after chunk, by the generator that serves prompts: what
is timed is all that reading takes, the host's part included. Times on a CPU are those
that the processors worked, which other programs disturb less.
"""

import statistics
from collections.abc import Iterator

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import bench_generation
from kimi_jax.modules.cache import cache_bytes

Curve = list[tuple[int, float]]  # tokens read so far, milliseconds of the last chunk


def run(config: ConfigDict) -> dict:
    """Returns the device, versions, rows, and a curve for each pattern of layers."""
    rows, curves = [], {}
    for pattern in config.patterns:
        curve, memory = read(pattern, config)
        curves[pattern] = curve
        rows += [row | memory for row in summary(pattern, curve, config)]
    return {
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}",
        "rows": rows,
        "curves": curves,
        "axes": ("tokens read before", f"milliseconds a chunk of {config.chunk}"),
    }


def read(pattern: str, config: ConfigDict) -> tuple[Curve, dict[str, float]]:
    """Every chunk of a prompt of the longest context, and what memory it took."""
    total = max(config.contexts)
    generator = bench_generation.make(pattern, total + 1, 1, config)
    vocabulary = generator.model.vocab_size
    drawn_N = np.random.default_rng(0).integers(0, vocabulary, total + 1)
    generator.read([warm := generator.open(drawn_N[: 2 * config.chunk + 1])])
    generator.close(warm)
    sequence = generator.open(drawn_N)
    curve = []
    while sequence.waiting > 1:
        started = bench_generation.clock()
        generator.read_chunk([sequence])
        jax.block_until_ready(generator.cache)
        spent = bench_generation.clock() - started
        curve.append((sequence.read, 1e3 * spent))
        if sequence.read in config.contexts:
            print(f"{pattern}: {sequence.read:,} tokens read, {1e3 * spent:.0f} ms")
    return curve, {
        "cache MB": sum(cache_bytes(generator.cache).values()) / 1e6,
        "peak GB": bench_generation.peak(),
    }


def summary(pattern: str, curve: Curve, config: ConfigDict) -> Iterator[dict]:
    """Rows: a chunk after each context, and the line through all of them.

    A chunk's milliseconds are the median of the last eighth of the chunks so far.
    Softmax attention gives the line its slope, the cost of a token of the past.
    """
    read_N, ms_N = (np.array(x) for x in zip(*curve, strict=True))
    slope, level = np.polyfit(read_N - config.chunk, ms_N, 1)
    for context in config.contexts:
        near_N = (read_N > 0.875 * context) & (read_N <= context)
        yield {
            "case": f"chunk at {context}",
            "implementation": pattern,
            "ms": statistics.median(ms_N[near_N]),
            "line ms": level + slope * 0.9375 * context,
            "seconds so far": 1e-3 * ms_N[read_N <= context].sum(),
        }
