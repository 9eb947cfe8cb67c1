"""Compile time and memory of the train step do not grow with depth."""

import time

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.train import loop
from kimi_jax.train.step import Batch, init_state, make_train_step
from tests import tiny


def compiled(layers: int, *overrides: str):
    """(seconds to compile, temporary bytes) of a train step with K3's pattern."""
    pattern = ",".join(
        "mla" if (i + 1) % 4 == 0 or i + 1 == layers else "kda" for i in range(layers)
    )
    cfg = tiny.make(
        f"model.num_layers={layers}",
        f"model.attention={pattern}",
        "model.residual.block_size=12",
        *overrides,
    )
    transform = loop._transform(cfg)
    state = jax.eval_shape(lambda: init_state(cfg, transform))
    row = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    batch = Batch(row, row, row, jax.ShapeDtypeStruct((4, 32), jnp.float32))
    lowered = jax.jit(make_train_step(cfg, transform)).lower(state, batch)
    started = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - started
    return seconds, executable.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_93_layers_compile_within_three_times_12():
    compiled(4)  # the first compilation pays for XLA's own start
    short, _ = compiled(12)
    long, _ = compiled(93)
    assert long < 3 * short, (short, long)


@pytest.mark.slow
def test_remat_keeps_memory_from_growing_with_depth():
    """Nested remat keeps block inputs: 5 more blocks cost 5 banks, not 60 layers."""
    memory = {
        (layers, remat): compiled(
            layers, "model.attention=gqa", f"train.remat={remat}"
        )[1]
        for layers in (24, 84)
        for remat in ("none", "nested")
    }
    grown = {r: memory[84, r] - memory[24, r] for r in ("none", "nested")}
    assert grown["nested"] < 0.25 * grown["none"], memory
