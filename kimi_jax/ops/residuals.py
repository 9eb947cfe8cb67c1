"""Depth mix of Block Attention Residuals.

A sublayer reads a softmax-weighted average over depth instead of one running sum:
over the bank of finished block sums, and over the partial sum of the current block.
The bank has fixed size S so that layers can be scanned; rows past `num_sources` are
not yet written and stay inert whatever they hold. The bank is never copied: the
partial sum is scored beside it and joins the softmax, and the backward pass keeps
only the inputs and one score and weight per source and token.

Source: Kimi K3 report, Eq. 8-10; Attention Residuals report, Sec. 3.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def mix_sources(
    bank_SBTD: Array,
    num_sources: int | Array,
    partial_BTD: Array,
    has_partial: bool | Array,
    query_D: Array,
    gain_D: Array,
    eps: float,
    *,
    inverse_rms_SBT: Array | None = None,
) -> tuple[Array, Array]:
    """softmax_s(<gain * rms_normalised source_s, query>) weighted sum of the sources.

    Values are the sources themselves, not normalised. Scores, softmax and sum are
    float32 or wider. With one valid source the result is that source exactly.

    Args:
      bank_SBTD: [S, B, T, D], finished block sums, the embedding first.
      num_sources: how many leading bank rows are valid, may be traced.
      partial_BTD: [B, T, D], running sum of the current block.
      has_partial: whether the partial sum is a source, may be traced. At least one
        source must be valid.
      query_D: [D], learned; zero gives the uniform mean.
      gain_D: [D], learned gain of the key normalisation.
      eps: added to the mean square inside the root, 1e-5 in K3.
      inverse_rms_SBT: `inverse_rms(bank)`, taken once when a row is written rather
        than at each of the sublayers that read it; computed here if None.

    Returns:
      h_BTD in partial_BTD's dtype, and the weights [S+1, B, T] in float32 or wider:
      one row per bank row, 0 where not valid, then the partial sum.

    Raises:
      ValueError: shapes do not match, num_sources > S, or no source at all.
    """
    S = bank_SBTD.shape[0]
    _check(bank_SBTD, partial_BTD, query_D, gain_D, inverse_rms_SBT)
    _check_counts(num_sources, has_partial, S)
    if inverse_rms_SBT is None:
        inverse_rms_SBT = inverse_rms(bank_SBTD, eps)
    wide = inverse_rms_SBT.dtype
    inverse_rms_BT = inverse_rms(partial_BTD, eps).astype(wide)
    direction_D = query_D.astype(wide) * gain_D.astype(wide)
    in_bank_S = jnp.arange(S) < num_sources
    valid_S = jnp.append(in_bank_S, jnp.asarray(has_partial, bool))
    return _mix(
        bank_SBTD, inverse_rms_SBT, partial_BTD, inverse_rms_BT, direction_D, valid_S
    )


def mix_reference(
    sources: list[Array], query_D: Array, gain_D: Array, eps: float
) -> tuple[Array, Array]:
    """The same mix over a Python list of [B, T, D] sources: (h, weights [n, B, T])."""
    dtype = jnp.promote_types(sources[0].dtype, jnp.float32)
    values = jnp.stack([x.astype(dtype) for x in sources])
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    keys = values / jnp.sqrt(mean_square + eps) * gain_D
    weights = jax.nn.softmax(jnp.sum(keys * query_D, axis=-1), axis=0)
    h_BTD = jnp.sum(weights[..., None] * values, axis=0)
    return h_BTD.astype(sources[0].dtype), weights


def total_depth_weights(
    weights_SBT: Array, segment_ids_BT: Array | None = None
) -> Array:
    """Sum of the mix weights over the tokens that are not padding, for monitoring.

    Args:
      weights_SBT: [S+1, B, T] from `mix_sources`.
      segment_ids_BT: int [B, T], 0 = padding, or None for no padding.

    Returns:
      [S+1] without gradient; its sum is the number of such tokens.
    """
    weights_SBT = lax.stop_gradient(weights_SBT)
    if segment_ids_BT is not None:
        weights_SBT = jnp.where(segment_ids_BT > 0, weights_SBT, 0)
    return jnp.sum(weights_SBT, axis=(1, 2))


def total_mean_square(x_BTD: Array, segment_ids_BT: Array | None = None) -> Array:
    """Sum of mean(x^2) over the tokens that are not padding, for monitoring.

    Args:
      segment_ids_BT: int [B, T], 0 = padding, or None for no padding.

    Returns:
      A scalar in float32 or wider, without gradient.
    """
    x_BTD = lax.stop_gradient(x_BTD).astype(_wide(x_BTD))
    square_BT = jnp.mean(jnp.square(x_BTD), axis=-1)
    if segment_ids_BT is not None:
        square_BT = jnp.where(segment_ids_BT > 0, square_BT, 0)
    return jnp.sum(square_BT)


@jax.custom_vjp
def inverse_rms(x_BTD: Array, eps: float) -> Array:
    """1 / sqrt(mean(x^2) + eps) over the last axis, in float32 or wider.

    Where no gradient arrives none leaves, even if x holds NaN: unwritten bank rows
    need no masking. `eps` gets no gradient.

    Args:
      x_BTD: [..., D].
      eps: added to the mean square inside the root.

    Returns:
      [...], one axis less.
    """
    x_BTD = x_BTD.astype(_wide(x_BTD))
    return lax.rsqrt(jnp.mean(jnp.square(x_BTD), axis=-1) + eps)


def _inverse_rms_fwd(x_BTD, eps):
    r_BT = inverse_rms(x_BTD, eps)
    return r_BT, (x_BTD, r_BT)


def _inverse_rms_bwd(saved, dr_BT):
    x_BTD, r_BT = saved
    slope_BT1 = (-dr_BT * r_BT**3 / x_BTD.shape[-1])[..., None]
    dx_BTD = jnp.where((dr_BT == 0)[..., None], 0, slope_BT1 * x_BTD)
    return dx_BTD.astype(x_BTD.dtype), None


inverse_rms.defvjp(_inverse_rms_fwd, _inverse_rms_bwd)


@jax.custom_vjp
def _mix(bank_SBTD, r_SBT, partial_BTD, r_BT, direction_D, valid_S):
    return _mix_fwd(bank_SBTD, r_SBT, partial_BTD, r_BT, direction_D, valid_S)[0]


def _mix_fwd(bank_SBTD, r_SBT, partial_BTD, r_BT, direction_D, valid_S):
    dot_SBT = _rows(bank_SBTD, partial_BTD, direction_D)
    score_SBT = dot_SBT * jnp.concatenate([r_SBT, r_BT[None]])
    score_SBT = jnp.where(valid_S[:, None, None], score_SBT, -jnp.inf)
    p_SBT = jax.nn.softmax(score_SBT, axis=0)

    def add_row(s, h_BTD):
        row_BTD = p_SBT[s, :, :, None] * bank_SBTD[s]
        return h_BTD + jnp.where(valid_S[s], row_BTD, 0)

    S = bank_SBTD.shape[0]
    h_BTD = jnp.where(valid_S[S], p_SBT[S, :, :, None] * partial_BTD, 0)
    # Unrolled rows fuse into one pass; a reduction over the leading axis does not.
    h_BTD = lax.fori_loop(0, S, add_row, h_BTD, unroll=8).astype(partial_BTD.dtype)
    saved = bank_SBTD, r_SBT, partial_BTD, r_BT, direction_D, valid_S, dot_SBT, p_SBT
    return (h_BTD, p_SBT), saved


def _mix_bwd(saved, cotangents):
    bank_SBTD, r_SBT, partial_BTD, r_BT, direction_D, valid_S, dot_SBT, p_SBT = saved
    dh_BTD, dp_SBT = cotangents
    dh_BTD = dh_BTD.astype(p_SBT.dtype)
    valid_S11 = valid_S[:, None, None]
    dp_SBT = jnp.where(valid_S11, dp_SBT + _rows(bank_SBTD, partial_BTD, dh_BTD), 0)
    dscore_SBT = p_SBT * (dp_SBT - jnp.sum(p_SBT * dp_SBT, axis=0))
    dr_SBT = jnp.where(valid_S11, dscore_SBT * dot_SBT, 0)
    ddot_SBT = dscore_SBT * jnp.concatenate([r_SBT, r_BT[None]])
    ddot_SBT = jnp.where(valid_S11, ddot_SBT, 0)[..., None]
    p_SBT = p_SBT[..., None]

    dbank_SBTD = p_SBT[:-1] * dh_BTD + ddot_SBT[:-1] * direction_D
    dpartial_BTD = p_SBT[-1] * dh_BTD + ddot_SBT[-1] * direction_D
    from_bank = jnp.where(valid_S11[:-1, ..., None], ddot_SBT[:-1] * bank_SBTD, 0)
    from_partial = jnp.where(valid_S[-1], ddot_SBT[-1] * partial_BTD, 0)
    ddirection_D = jnp.sum(from_bank, axis=(0, 1, 2)) + jnp.sum(from_partial, (0, 1))
    return (
        dbank_SBTD.astype(bank_SBTD.dtype),
        dr_SBT[:-1],
        dpartial_BTD.astype(partial_BTD.dtype),
        dr_SBT[-1],
        ddirection_D,
        None,
    )


_mix.defvjp(_mix_fwd, _mix_bwd)


def _rows(bank_SBTD, partial_BTD, direction):
    """Inner products of every source with `direction`: [S+1, B, T]."""
    bank_SBT = jnp.sum(bank_SBTD * direction, axis=-1)
    return jnp.concatenate([bank_SBT, jnp.sum(partial_BTD * direction, axis=-1)[None]])


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _check(bank_SBTD, partial_BTD, query_D, gain_D, inverse_rms_SBT):
    if bank_SBTD.ndim != 4 or bank_SBTD.shape[1:] != partial_BTD.shape:
        raise ValueError(
            f"bank has shape {bank_SBTD.shape} and partial {partial_BTD.shape}, "
            "expected [S, B, T, D] and [B, T, D]"
        )
    D = partial_BTD.shape[-1]
    if query_D.shape != (D,) or gain_D.shape != (D,):
        raise ValueError(
            f"query has shape {query_D.shape} and gain {gain_D.shape}, expected both "
            f"[D] = ({D},), the width of the sources"
        )
    if inverse_rms_SBT is not None and inverse_rms_SBT.shape != bank_SBTD.shape[:-1]:
        raise ValueError(
            f"inverse_rms_SBT has shape {inverse_rms_SBT.shape}, expected "
            f"{bank_SBTD.shape[:-1]}; pass inverse_rms(bank, eps)"
        )


def _check_counts(num_sources, has_partial, S):
    if not isinstance(num_sources, int):
        return  # an array: its value may not be known
    if not 0 <= num_sources <= S:
        raise ValueError(
            f"num_sources is {num_sources}, expected 0 to S={S}; the bank has S rows"
        )
    if num_sources == 0 and has_partial is False:
        raise ValueError(
            "num_sources is 0 and has_partial is False, expected at least one source; "
            "push the embedding into the bank or pass it as the partial sum"
        )
