"""From logits to the next token of each row.

Filters apply in this order, to the distribution at the row's temperature: the `top_k`
likeliest; of these the fewest whose probabilities reach `top_p`; of these all that have
`min_p` of the probability of the likeliest. The noise belongs to seed and position, so
a row's token depends neither on the other rows nor on its place among them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Raises:
      UserError: a value out of its range.
    """

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            problems.append(
                f"temperature={self.temperature}: must be finite and at least 0; 0 "
                "takes the likeliest token"
            )
        if self.top_k < 0 or self.top_k != int(self.top_k):
            problems.append(f"top_k={self.top_k}: a count of tokens; 0 keeps all")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: must be in (0, 1]; 1 keeps all")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p={self.min_p}: must be in [0, 1]; 0 keeps all")
        if problems:
            raise UserError("\n".join(problems))


class Knobs(NamedTuple):
    """The settings of every row."""

    seed_B: Any  # uint32
    temperature_B: Any
    top_k_B: Any
    top_p_B: Any
    min_p_B: Any


def make_knobs(rows: Sequence[tuple[Sampling, int] | None]) -> Knobs:
    """Of (sampling, seed) for each row; None: a row that draws nothing."""
    filled = [row or (Sampling(0.0), 0) for row in rows]
    return Knobs(
        np.array([seed % 2**32 for _, seed in filled], np.uint32),
        np.array([s.temperature for s, _ in filled], np.float32),
        np.array([s.top_k for s, _ in filled], np.int32),
        np.array([s.top_p for s, _ in filled], np.float32),
        np.array([s.min_p for s, _ in filled], np.float32),
    )


def draw(
    logits_BW: jax.Array, position_B: jax.Array, knobs: Knobs, allowed_W: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row, int32 [B], and its log-probability [B].

    Args:
      logits_BW: float32 or wider.
      position_B: index that the token will have in its sequence.
      allowed_W: bool; tokens that may be drawn.

    Returns:
      The log-probability is that of the model itself, the log-softmax of all logits:
      no temperature, no filter, no `allowed_W`. That is what a learner computes again.
    """
    masked_BW = jnp.where(allowed_W, logits_BW, -jnp.inf)
    hot_B = knobs.temperature_B > 0
    scaled_BW = masked_BW / jnp.where(hot_B, knobs.temperature_B, 1.0)[:, None]
    filters = (knobs.top_k_B > 0) | (knobs.top_p_B < 1) | (knobs.min_p_B > 0)
    scaled_BW = jax.lax.cond(  # sorting a vocabulary is not free
        jnp.any(filters & hot_B), _filtered, lambda x, _: x, scaled_BW, knobs
    )

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits_BW.shape[1:], jnp.float32)

    noise_BW = jax.vmap(noise)(knobs.seed_B, position_B)
    drawn_B = jnp.argmax(scaled_BW + noise_BW, axis=-1)
    token_B = jnp.where(hot_B, drawn_B, jnp.argmax(masked_BW, axis=-1))
    token_B = token_B.astype(jnp.int32)
    logprob_BW = jax.nn.log_softmax(logits_BW, axis=-1)
    logprob_B1 = jnp.take_along_axis(logprob_BW, token_B[:, None], axis=1)
    return token_B, logprob_B1[:, 0]


def _filtered(scaled_BW: jax.Array, knobs: Knobs) -> jax.Array:
    """-inf for what the filters take away. Ties go to the lower token."""
    order_BW = jnp.argsort(-scaled_BW, axis=-1, stable=True)
    sorted_BW = jnp.take_along_axis(scaled_BW, order_BW, axis=-1)
    rank_W = jnp.arange(scaled_BW.shape[1])
    top_k_B1 = knobs.top_k_B[:, None]
    keep_BW = (top_k_B1 == 0) | (rank_W < top_k_B1)
    p_BW = jax.nn.softmax(jnp.where(keep_BW, sorted_BW, -jnp.inf), axis=-1)
    top_p_B1 = knobs.top_p_B[:, None]
    # Rounding must not take a token from a row that keeps all.
    keep_BW &= (top_p_B1 >= 1) | (jnp.cumsum(p_BW, axis=-1) - p_BW < top_p_B1)
    keep_BW &= p_BW >= knobs.min_p_B[:, None] * p_BW[:, :1]
    row_B1 = jnp.arange(scaled_BW.shape[0])[:, None]
    keep_BW = jnp.zeros_like(keep_BW).at[row_B1, order_BW].set(keep_BW)
    return jnp.where(keep_BW, scaled_BW, -jnp.inf)
