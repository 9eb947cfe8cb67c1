"""How fast KDA forgets and writes, in numbers small enough to log at every layer.

A channel keeps alpha = exp(-decay) of its state from token to token. Decays span many
octaves, so their distribution is read off counts above fixed edges, half an octave
apart: a compare and a sum, no sort and no scatter, and shares of several micro-batches
add up. A few dozen positions of each row say as much as all of them.

Letters: B rows, T tokens, H heads, K key channels, Q edges.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kda.gates import log_decay

# In nats a token: 8 leaves 0.0003 of the state, 2^-14 halves it in 11,000 tokens.
EDGES = 2.0 ** np.arange(-14, 3.5, 0.5)
POSITIONS = 32  # most positions of a row that are looked at, evenly spaced
# And all tokens of its first tile, and of one in the middle: the kernels divide by the
# decay through a tile, which must not leave the range of float32, 87 nats.
TILE = 16
# A sigmoid this close to 1 has no gradient left to speak of.
_AT_BOUND = 0.99


def observe(
    g_BTHK: jax.Array,
    beta_BTH: jax.Array,
    square_B: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    a_log_H: jax.Array,
    dt_bias: jax.Array,
    lower_bound: float | None,
) -> dict[str, jax.Array]:
    """Sums over sampled tokens, and over rows. Padding is not counted.

    Args:
      g_BTHK: logits of the decay gate.
      beta_BTH: logits of the write strength.
      square_B: mean square of the state after the last token of each row.
      segment_ids_BT: 0 = padding, or None for no padding.
      a_log_H: log of the gate's slope.
      dt_bias: [H * K].
      lower_bound: of the bounded gate, None for softplus.

    Returns:
      Over tokens: decay_above_Q, the share of channels that decay faster than each
      edge; at_bound, the share within 1 % of the bound (bounded gate only); beta, the
      mean over heads; sampled, how many tokens. Over rows with a token: state_square,
      the mean square of the state; state_rows, how many. And tile_decay, the largest
      decay of a channel through a tile, in nats. All without gradient.
    """
    g_BTHK, beta_BTH, square_B, a_log_H, dt_bias = lax.stop_gradient(
        (g_BTHK, beta_BTH, square_B, a_log_H, dt_bias)
    )
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(g_BTHK.shape[:2], jnp.int32)
    every = slice(None, None, -(-g_BTHK.shape[1] // POSITIONS))
    real_BP = segment_ids_BT[:, every] > 0
    dtype = jnp.promote_types(g_BTHK.dtype, jnp.float32)
    g_BPHK = log_decay(g_BTHK[:, every].astype(dtype), a_log_H, dt_bias, lower_bound)
    above_BPQ = jnp.mean(-g_BPHK[..., None] > EDGES.astype(dtype), (2, 3), dtype)
    sums = {
        "decay_above_Q": _over_tokens(above_BPQ, real_BP),
        "beta": _over_tokens(
            jnp.mean(jax.nn.sigmoid(beta_BTH[:, every].astype(dtype)), -1), real_BP
        ),
        "sampled": jnp.sum(real_BP, dtype=jnp.int32),
    }
    if lower_bound is not None:
        bound_BP = jnp.mean(g_BPHK < _AT_BOUND * lower_bound, (2, 3), dtype)
        sums["at_bound"] = _over_tokens(bound_BP, real_BP)
    sums["tile_decay"] = _tile_decay(
        g_BTHK.astype(dtype), segment_ids_BT > 0, a_log_H, dt_bias, lower_bound
    )
    real_B = jnp.any(segment_ids_BT > 0, axis=1)
    sums["state_square"] = jnp.sum(jnp.where(real_B, square_B, 0))
    sums["state_rows"] = jnp.sum(real_B, dtype=jnp.int32)
    return sums


def _tile_decay(g_BTHK, real_BT, a_log_H, dt_bias, lower_bound):
    """The largest sum of decays over one of two tiles of each row."""
    middle = g_BTHK.shape[1] // 2 // TILE * TILE
    found = []
    for start in (0, middle):
        tile = slice(start, start + TILE)
        g_BCHK = log_decay(g_BTHK[:, tile], a_log_H, dt_bias, lower_bound)
        g_BCHK = jnp.where(real_BT[:, tile, None, None], g_BCHK, 0)
        found.append(jnp.max(jnp.sum(-g_BCHK, axis=1), initial=0))
    return jnp.maximum(*found)


def alpha_quantile(above_Q: np.ndarray, quantile: float) -> float:
    """The alpha that a share `quantile` of the channels is below, from `observe`.

    Interpolated in the logarithm of the decay, so exact at the edges and within a few
    percent of the decay between them; decays past either end count as that edge.

    Args:
      above_Q: share of channels above each of `EDGES`: a mean of decay_above_Q.
      quantile: in (0, 1).
    """
    log_decays = np.log(EDGES)
    at = np.interp(quantile, np.asarray(above_Q)[::-1], log_decays[::-1])
    return float(np.exp(-np.exp(at)))


def _over_tokens(x_BP, real_BP):
    """Sum over the real tokens; what padding holds does not matter."""
    real_BP = real_BP.reshape(real_BP.shape + (1,) * (x_BP.ndim - 2))
    return jnp.sum(jnp.where(real_BP, x_BP, 0), (0, 1))
