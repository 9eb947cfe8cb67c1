"""KDA token by token: the definition that every other implementation is held to.

One `lax.scan` over time, differentiated by JAX. It saves a state per token, so it is
for tests, for single tokens (`kda_step`) and for reading, not for training.
Source: Kimi K3 report, Eq. 1; Kimi Linear report, Eq. 1.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gates import Inputs, Options, Prepared, prepare
from pallas_kernels.kda.segments import Runs

Array = jax.Array


def update(state_BHKV: Array, token: Prepared) -> tuple[Array, Array]:
    """Advances the state by one token: decay first, then the delta rule, then read.

    Args:
      state_BHKV: state before the token.
      token: prepared tensors of the token: q, k, g [B,H,K], v [B,H,V], beta [B,H].

    Returns:
      The new state and the output [B,H,V].
    """
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = token
    highest = jax.lax.Precision.HIGHEST
    state_BHKV = jnp.exp(g_BHK)[..., None] * state_BHKV
    recalled_BHV = jnp.einsum("bhk,bhkv->bhv", k_BHK, state_BHKV, precision=highest)
    delta_BHV = beta_BH[..., None] * (v_BHV - recalled_BHV)
    state_BHKV = state_BHKV + k_BHK[..., None] * delta_BHV[..., None, :]
    o_BHV = jnp.einsum("bhk,bhkv->bhv", q_BHK, state_BHKV, precision=highest)
    return state_BHKV, o_BHV


def step_gradients(
    inputs: Inputs, state_BHKV: Array, options: Options, cotangents: tuple
) -> tuple:
    """Gradients of one token by its raw inputs and the state before it.

    For the fused kernels: nobody trains token by token, but a gradient must be right.
    """

    def plain(inputs, state):
        state, o = update(state, prepare(inputs, None, options, state.dtype))
        return o.astype(inputs.v.dtype), state

    return jax.vjp(plain, inputs, state_BHKV)[1](cotangents)


def kda_reference(
    inputs: Inputs, initial_state_BHKV: Array, runs: Runs | None, options: Options
) -> tuple[Array, Array]:
    """Runs the recurrence over all tokens.

    Args:
      inputs: raw inputs.
      initial_state_BHKV: state [B,HV,K,V] in the accumulation dtype.
      runs: documents of each row, or None for one document per row.
      options: static settings.

    Returns:
      o [B,T,HV,V] and the final state, both in the accumulation dtype.
    """
    dtype = initial_state_BHKV.dtype
    real_BT = None if runs is None else runs.real_BT
    prepared = prepare(inputs, real_BT, options, dtype)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), prepared)
    starts_TB = None if runs is None else runs.starts_BT.T

    def step(state_BHKV: Array, xs: tuple) -> tuple[Array, Array]:
        token, starts_B = xs
        if starts_B is not None:
            starts_B111 = starts_B[:, None, None, None]
            state_BHKV = jnp.where(starts_B111, 0.0, state_BHKV)
        return update(state_BHKV, token)

    state_BHKV, o_TBHV = jax.lax.scan(step, initial_state_BHKV, (tokens, starts_TB))
    o_BTHV = jnp.moveaxis(o_TBHV, 0, 1)
    if real_BT is not None:
        # q = 0 makes these outputs 0 already; this keeps NaN out of their gradients.
        o_BTHV = jnp.where(real_BT[:, :, None, None], o_BTHV, 0.0)
    return o_BTHV, state_BHKV
