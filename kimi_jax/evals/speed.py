"""How fast a model reads and writes after so many tokens, and what it has to keep.

Random tokens stand for text: experts apart, the time does not depend on them. Programs
are compiled and run once before they are timed.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import numpy as np

from kimi_jax import config
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.requests import Ask
from kimi_jax.infer.sampling import Sampling
from kimi_jax.infer.slots import Live
from kimi_jax.modules.cache import cache_bytes

_READ_CHUNK = 1024


def measure(
    model: config.Model,
    variables: Any,
    *,
    length: int,
    rows: int = 1,
    new_tokens: int = 32,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """Rates over all `rows`, and the bytes of one.

    Args:
      length: tokens of context that are read before any is written.
      rows: sequences that are decoded side by side.
      new_tokens: written and timed, for each row.

    Returns:
      prefill_tokens_per_second, decode_tokens_per_second, cache_bytes (of a sequence:
      what grows with length and what does not) and state_bytes (what does not).
    """
    generator = Generator(
        model,
        variables,
        slots=rows,
        length=length + 2 * new_tokens,
        mesh=mesh,
        read_chunk=min(_READ_CHUNK, 1 << math.ceil(math.log2(length))),
        decode_steps=new_tokens,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(model.vocab_size, size=(rows, length)).tolist()
    for sequence in _read(generator, prompts):
        generator.close(sequence)
    started = time.monotonic()
    live = _read(generator, prompts)
    prefill = time.monotonic() - started
    _write(generator, live, new_tokens)
    started = time.monotonic()
    _write(generator, live, new_tokens)
    decode = time.monotonic() - started
    parts = {name: size // rows for name, size in cache_bytes(generator.cache).items()}
    return {
        "prefill_tokens_per_second": rows * (length - 1) / prefill,
        "decode_tokens_per_second": rows * new_tokens / decode,
        "cache_bytes": sum(parts.values()),
        "state_bytes": parts["states"] + parts["conv tails"],
    }


def _read(generator: Generator, prompts: list[list[int]]) -> list[Live]:
    live = [generator.open(prompt) for prompt in prompts]
    generator.read(live)
    jax.block_until_ready(generator.cache)
    return live


def _write(generator: Generator, live: list[Live], count: int) -> None:
    ask = Ask(count, Sampling(0.0))
    for _ in generator.extend([(sequence, ask) for sequence in live]):
        pass
    jax.block_until_ready(generator.cache)
