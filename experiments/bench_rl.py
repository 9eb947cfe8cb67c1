"""The learner of reinforcement learning on long rows: seconds and memory.

Trajectories are drawn at random: what a step takes does not depend on what they say.
They go the way of all others, through packing, the scoring pass and the step.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import common
from experiments import bench_generation
from kimi_jax import config_io, plan, sharding
from kimi_jax.config import Config
from kimi_jax.environments.environment import Task
from kimi_jax.rl.experience import Experience, make_experience, on_mesh
from kimi_jax.rl.program import LEARNER
from kimi_jax.rl.step import make_score
from kimi_jax.rl.trajectory import Trajectory, Turn
from kimi_jax.train.program import lower_step, state_shape
from kimi_jax.train.step import make_transform, start_state


def run(config: ConfigDict) -> dict:
    """Returns the device, versions and one row for each size of pieces."""
    cfg = make(config)
    experience = draw(cfg, config)
    return {
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}",
        "rows": [*cases(cfg, experience, config)],
    }


def cases(cfg: Config, experience: Experience, config: ConfigDict) -> Iterator[dict]:
    """A row for each size; what asks for more memory than there is says so."""
    assert cfg.rl is not None
    for length in config.pieces:
        name = f"pieces of {length}" if length else "whole rows"
        row = {"case": f"{config.rows} x {config.length}", "implementation": name}
        rl = dataclasses.replace(cfg.rl, segment=length or None)
        try:
            row |= measure(dataclasses.replace(cfg, rl=rl), experience, config.steps)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            row["note"] = "out of memory"
        yield row


def measure(cfg: Config, host: Experience, steps: int) -> dict[str, Any]:
    """What scoring and a step take; the compiler's memory and that which was used."""
    assert cfg.rl is not None
    mesh, transform = sharding.make_mesh(cfg), make_transform(cfg)
    shapes = state_shape(cfg, mesh, transform)
    started = time.perf_counter()
    step = lower_step(LEARNER, cfg, mesh, transform, shapes).compile()
    compiled = time.perf_counter() - started
    memory = plan.memory_of(step, None)
    variables = bench_generation.draw(cfg.model)
    state = start_state(transform, variables["params"], variables.get("balance", {}))
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, shapes))
    experience = on_mesh(host, sharding.batch_sharding(mesh))
    score = jax.jit(make_score(cfg, cfg.rl.segment))
    with jax.set_mesh(mesh):
        old_BT, scoring = timed(
            lambda: score(state.params, state.balance, experience)[0], steps
        )
        experience = experience._replace(old_BT=old_BT, behaviour_BT=old_BT)
        seen, times = [], []
        for _ in range(1 + steps):
            started = time.perf_counter()
            state, metrics = step(state, experience, np.bool_(True))
            seen.append(jax.device_get(metrics))
            times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    return {
        "ms": 1e3 * seconds,
        "score ms": 1e3 * scoring,
        "tokens/s": host.tokens_BT.size / (seconds + scoring),
        "state GB": memory.arguments / 1e9,
        "temporary GB": memory.temporaries / 1e9,
        "peak GB": bench_generation.peak(),
        "compile s": compiled,
        "loss": float(seen[0]["loss"]),
        "gradient norm": float(seen[0]["gradient_norm"]),
    }


def timed(action: Callable[[], jax.Array], rounds: int) -> tuple[jax.Array, float]:
    """(result, median seconds) after a call that compiles."""
    found = jax.block_until_ready(action())
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - started)
    return found, statistics.median(times)


def make(config: ConfigDict) -> Config:
    """The config of a learner of these sizes."""
    values = common.base()
    model, width = values.model, config.head_dim
    model.update(
        width=config.width,
        num_layers=config.layers,
        attention=tuple(config.attention),
        dtype=config.dtype,
    )
    model.kda.update(
        num_heads=config.heads,
        key_dim=width,
        value_dim=width,
        gate_rank=width,
        chunk_size=64,
    )
    model.mla.update(
        num_heads=config.heads,
        q_rank=None,
        kv_rank=2 * width,
        nope_dim=width,
        pe_dim=width // 2,
        value_dim=width,
        block_size=1024,
    )
    model.ffn.update(num_dense_layers=config.layers, width=config.ffn_width)
    values.optimizer.kind = "adamw"
    values.train.update(
        steps=100,
        batch_size=config.rows,
        seq_len=config.length,
        remat=config.remat,
        loss_chunk=16_384,
    )
    values.rl = common.rl()
    values.rl.update(environments=("tools",), max_tokens=config.length + 1)
    return config_io.from_dict(values)


def draw(cfg: Config, config: ConfigDict) -> Experience:
    """A batch of rows, each filled by one trajectory: prompt, turn, answer, turn ..."""
    rng = np.random.default_rng(0)
    made = []
    for row in range(config.rows):
        tokens = rng.integers(0, 256, config.length + 1).tolist()
        starts = range(config.answer, config.length + 1, config.turn + config.answer)
        turns = [
            Turn(at, min(at + config.turn, config.length + 1), float(rng.normal()))
            for at in starts
        ]
        written = sum(turn.stop - turn.start for turn in turns)
        one = Trajectory(Task("", 1, config.length, row), row, 0, tokens, turns)
        one.logprobs = [-1.0] * written  # in their place come those of the policy
        made.append(one)
    credit = [np.array([turn.reward for turn in one.turns]) for one in made]
    packed = make_experience(
        made, credit, cfg.train.seq_len, cfg.train.batch_size, batches=1
    )
    assert len(packed.used) == config.rows
    return packed.batches[0]
