"""A model with every mechanism of K3 that compiles in seconds, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from kimi_jax import canonical, config_io
from kimi_jax.config import Config, Model
from kimi_jax.modules import transformer

# Attention and optimizer that compile fast; experts, for they are most of K3.
QUICK = (
    "model.num_layers=2",
    "model.attention=gqa",
    "model.residual.kind=none",
    "optimizer.kind=adamw",
    "mesh.fsdp=2",
    "mesh.expert=2",
)


def values():
    """Plain values: 6 layers, 2 experts of 4, 2 residual blocks."""
    config = common.base()
    config.name = "tiny"
    model = config.model
    model.update(vocab_size=272, width=16, num_layers=6, init_std=0.2)
    model.attention = ("kda", "kda", "mla")
    model.kda.update(num_heads=2, key_dim=8, value_dim=8, gate_rank=4, chunk_size=16)
    model.mla.update(
        num_heads=2,
        q_rank=8,
        kv_rank=8,
        nope_dim=8,
        pe_dim=4,
        value_dim=8,
        block_size=16,
    )
    model.gqa.update(num_heads=4, num_kv_heads=2, head_dim=8, block_size=16)
    model.ffn.width = 32
    model.moe.update(num_experts=4, expert_width=8, latent_width=8, num_shared=1)
    model.moe.balancing.update(bins=100, threshold_cap=3)
    model.residual.block_size = 3.0
    config.train.update(
        steps=4,
        batch_size=4,
        seq_len=32,
        log_every=1,
        eval_every=2,
        eval_batches=1,
        checkpoint_every=2,
        loss_chunk=64,
    )
    config.sample.update(num_tokens=4, prompt="A")
    return config


def make(*overrides: str) -> Config:
    return config_io.from_dict(values(), overrides)


@functools.cache
def variables(model: Model, seed: int = 0) -> dict:
    """Random {"params", "balance"}, none of them at a special value.

    numpy draws them: compiling the model's own draw would take longer than most tests.
    """
    shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = canonical.path_name(path).rsplit("/", 1)[-1]
        centre = 1.0 if "norm" in name or name == "gain" else 0.0
        value = centre + 0.2 * rng.normal(size=leaf.shape)
        return jnp.asarray(value, jnp.promote_types(model.dtype, jnp.float32))

    return jax.tree_util.tree_map_with_path(draw, shapes)
