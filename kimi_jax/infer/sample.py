"""Sampling by reading the whole text again for every token.

There is no cache: each token costs a forward pass over the full buffer. That is right
for the short sample at the end of a training run, and it is the reference that a cached
decoder has to agree with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import config
from kimi_jax.modules import transformer


def sample(
    model: config.Model,
    variables: Any,
    prompt_T: jax.Array,
    num_tokens: int,
    temperature: float,
    key: jax.Array,
    allowed_W: jax.Array,
) -> jax.Array:
    """`prompt_T` continued by `num_tokens` tokens, int32 [T + num_tokens].

    Args:
      variables: {"params", "balance"}.
      temperature: 0 takes the likeliest token.
      allowed_W: bool; tokens that may be drawn.
    """
    start, length = prompt_T.shape[0], prompt_T.shape[0] + num_tokens
    tokens_T = jnp.zeros(length, jnp.int32).at[:start].set(prompt_T)

    def extend(i: jax.Array, tokens_T: jax.Array) -> jax.Array:
        # Positions not yet written are padding, which no layer lets through.
        segment_ids_T = (jnp.arange(length) < i).astype(jnp.int32)
        out = transformer.apply(model, variables, tokens_T[None], segment_ids_T[None])
        logits_W = transformer.logits(out.h_BTD[0, i - 1], out.unembed_DW)
        logits_W = jnp.where(allowed_W, logits_W, -jnp.inf)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, i), logits_W / jnp.maximum(temperature, 1e-6)
        )
        token = jnp.where(temperature > 0.0, drawn, jnp.argmax(logits_W))
        return tokens_T.at[i].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(start, length, extend, tokens_T)
