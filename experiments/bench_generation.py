"""Generation: the cost of a token after a context, and of forking a prefix.

A cache is told that it holds the context, whatever is in it: the time of a call depends
on how much there is to read and not on what. The prefix that is forked is really read.
Times on a CPU are those that the processors worked, which other programs disturb less.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import common
from kimi_jax import config as config_lib
from kimi_jax import config_io
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.requests import Ask
from kimi_jax.infer.sampling import Sampling
from kimi_jax.modules import transformer
from kimi_jax.modules.cache import cache_bytes

SIZES = {
    "model.width": 64,
    "model.num_layers": 4,
    "model.kda.num_heads": 2,
    "model.kda.gate_rank": 16,
    "model.mla.num_heads": 2,
    "model.mla.q_rank": "none",
    "model.mla.kv_rank": 16,
    "model.mla.nope_dim": 16,
    "model.mla.pe_dim": 8,
    "model.mla.value_dim": 16,
    "model.mla.block_size": 256,
    "model.ffn.num_dense_layers": 0,
    "model.moe.num_experts": 4,
    "model.residual.block_size": 2,
}


def run(config: ConfigDict) -> dict:
    """Returns the device, versions and one row a measurement."""
    rows: list[dict] = []
    for pattern in config.patterns if config.contexts else ():
        for row in contexts(pattern, config):
            print(f"{pattern}, {row['case']}: {row['ms']:.3g} ms a token", flush=True)
            rows.append(row)
    if config.prefix:
        rows += fork(config.patterns[0], config)
    return {
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}",
        "rows": rows,
    }


def contexts(pattern: str, config: ConfigDict) -> Iterator[dict]:
    """Rows for decoding and reading after each context."""
    # Each action is called once more than it is timed.
    added = (config.rounds + 1) * (config.chunk + config.steps)
    generator = make(pattern, max(config.contexts) + added, 1, config)
    ask = Ask(config.steps, Sampling(0.0))
    for context in config.contexts:
        sequence = generator.open([1])
        generator.reserve(sequence, context)
        sequence.tokens, sequence.read = [1] * context, context - 1

        def decode(sequence=sequence) -> None:
            list(generator.extend([(sequence, ask)]))

        def read(sequence=sequence) -> None:
            generator.append(sequence, [1] * config.chunk)
            generator.read([sequence])
            jax.block_until_ready(generator.cache)

        for what, action, tokens in (
            ("decode", decode, config.steps),
            ("read", read, config.chunk),
        ):
            yield {
                "case": f"{what} at {context}",
                "implementation": pattern,
                "ms": 1e3 * median(action, config.rounds) / tokens,
                "cache MB": sum(cache_bytes(generator.cache).values()) / 1e6,
                "peak GB": peak(),
            }
        generator.close(sequence)


def fork(pattern: str, config: ConfigDict) -> Iterator[dict]:
    """Rows for reading a prefix once, and forking it for a group.

    Memory is that of the sequences that live, their states and the pages in use: this
    is what grows. The cache itself was allocated whole.
    """
    generator = make(pattern, config.prefix + config.chunk, config.forks + 1, config)
    warm = generator.open([1] * (config.chunk + 2))
    for one in [*generator.fork(warm, 1), warm]:
        generator.close(one)
    sequence = generator.open([1] * (config.prefix + 2))

    def row(case: str, action: Callable[[], object]) -> dict:
        started = clock()
        action()
        jax.block_until_ready(generator.cache)
        spent = clock() - started
        return {
            "case": case,
            "implementation": pattern,
            "ms": 1e3 * spent,
            "pages": generator.pager.in_use(),
            **megabytes(generator),
            "peak GB": peak(),
        }

    prefill = row(f"prefill {config.prefix}", lambda: generator.read([sequence]))
    yield prefill
    forks = row(f"{config.forks} forks", lambda: generator.fork(sequence, config.forks))
    yield {**forks, "share of prefills": forks["ms"] / (config.forks * prefill["ms"])}


def megabytes(generator: Generator) -> dict[str, float]:
    """Of the sequences that live: their states, and the pages in use."""
    parts = cache_bytes(generator.cache)
    pool = parts.pop("pages")
    live = generator.slots - len(generator.free_slots())
    pages = jax.tree.leaves(generator.cache.pages)
    used = generator.pager.in_use() / pages[0].shape[2] if pages else 0.0
    states = sum(parts.values()) * live / generator.slots
    return {"states MB": states / 1e6, "pages MB": pool * used / 1e6}


def make(pattern: str, length: int, slots: int, config: ConfigDict) -> Generator:
    values = [f"{name}={value}" for name, value in SIZES.items()]
    values += [f"model.attention={pattern}", *config.model]
    cfg = config_io.from_dict(common.base(), values)
    model = cfg.model
    return Generator(
        model,
        draw(model),
        slots=slots,
        length=length,
        page_size=256,
        # All slots share one long context.
        num_pages=-(-length // 256) + 4 * slots,
        read_chunk=config.chunk,
        decode_steps=config.steps,
    )


def draw(model: config_lib.Model) -> Any:
    """Variables by numpy: compiling the model's own draw takes longer."""
    shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.numpy.asarray(0.05 * rng.normal(size=x.shape), x.dtype), shapes
    )


def clock() -> float:
    """Seconds: of the processors, or on the wall where an accelerator computes."""
    cpu = jax.default_backend() == "cpu"
    return time.process_time() if cpu else time.perf_counter()


def median(action: Callable[[], None], rounds: int) -> float:
    """Seconds of `clock`, after a call that compiles."""
    action()
    times = []
    for _ in range(rounds):
        started = clock()
        action()
        times.append(clock() - started)
    return statistics.median(times)


def peak() -> float:
    """Most gigabytes that this process ever had: of a device, or of a CPU's host."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return device_peak(jax.local_devices()) or host


def device_peak(devices: Iterable[jax.Device]) -> float:
    """Most gigabytes ever in use on one of these; 0: not counted."""
    stats = [device.memory_stats() or {} for device in devices]
    return max(one.get("peak_bytes_in_use", 0) for one in stats) / 1e9
