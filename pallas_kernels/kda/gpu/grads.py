"""Gradients by the raw inputs, one program a chunk and head.

With dx for the gradient by x, and products over pairs carrying the decay in between:

    dL = -stril(dR X^T)    dP = tril(dO X^T)    dv = b dR
    dq   = e^G (dO S^T) + dP k
    rise = dL k - e^G (dR S^T)                  db = rowsum(dR . V) + rowsum(k . rise)
    fall = e^(G_C - G) (X dS'^T) + dP^T q + (b dL)^T k           dk = b rise + fall
    dG   = q . dq + k . (b rise - fall),  and the last row also feels the state's decay

q and k grow with exp(G) where they are rows and with exp(-G) where they are columns,
so the gradient by G needs no further product. dg is the sum of dG over later tokens.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    UNSHIFT,
    dot,
    exp2,
    from_start,
    grid_ij,
    inverse_norm,
    level_mask,
    levels,
    load_rows,
    log2_decay,
    outer_factors,
    pair_factor,
    real_rows,
    run_masks,
    sigmoid,
    softplus,
    store_rows,
    stretch_sum,
    tile_offsets,
    to_block_end,
    to_end,
    wide_column,
    wide_exponents,
    wide_mask,
    wide_row,
    write_strength,
)


@triton.jit
def normalise_backward(dy, y, inverse, NORM: tl.constexpr):
    """Gradient by x of y = x * inverse_norm(x)."""
    if NORM:
        return (dy - y * tl.sum(dy * y, axis=1)[:, None]) * inverse[:, None]
    else:
        return dy


@triton.jit
def gate_backward(dg, z, slope, bound, GATE: tl.constexpr):
    """(gradient by the gate's logits, its part of the gradient by A_log), [C,K] each."""
    if GATE == "bounded":
        s = sigmoid(slope * z)
        dz = dg * (bound * slope) * s * (1.0 - s)
        return dz, dz * z
    elif GATE == "softplus":
        return -dg * slope * sigmoid(z), -dg * slope * softplus(z)
    else:
        return dg, dg


@triton.jit
def strength_backward(db, raw, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """Gradient by the raw beta."""
    if SIGMOID:
        s = sigmoid(raw)
        db *= s * (1.0 - s)
    if DOUBLE:
        db *= 2.0
    return db


@triton.jit
def pair_gradients(x, out, r, b, same, DOT: tl.constexpr):
    """dP, dL and the transposes of dP and b dL, by swapped products; unmasked."""
    dp = tl.where(same, dot(out, x.T, DOT), 0.0)
    dp_t = tl.where(same, dot(x, out.T, DOT), 0.0)
    dl = tl.where(same, -dot(r, x.T, DOT), 0.0)
    dm_t = tl.where(same, -dot(x, r.T, DOT) * b[None, :], 0.0)
    return dp, dl, dp_t, dm_t


@triton.jit
def level_terms(
    q_rows, k_rows, decay, x, out, r, s_t, ds_t, b, same, enters, leaves,
    C: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: dq, dk, k . rise, dG and k . (part of dk from the state), [C,K] each."""
    pre, post = outer_factors(decay, C, DOT)
    pre, post = tl.where(enters[:, None], pre, 0.0), tl.where(leaves[:, None], post, 0.0)
    dq, rise = pre * dot(out, s_t, DOT), -pre * dot(r, s_t, DOT)
    fall = post * dot(x, ds_t, DOT)
    from_state = k_rows * fall
    dp, dl, dp_t, dm_t = pair_gradients(x, out, r, b, same, DOT)
    i, j = grid_ij(C)
    for level in range(levels(C)):
        factor = pair_factor(decay, level, C, DOT)
        mask = level_mask(1 << level, C)
        mask_t = ((j >> level) % 2 == 1) & (i >> level == (j >> level) - 1)
        right = (k_rows * factor).to(DOT)
        dq += factor * dot(tl.where(mask, dp, 0.0), right, DOT)
        rise += factor * dot(tl.where(mask, dl, 0.0), right, DOT)
        up = dot(tl.where(mask_t, dp_t, 0.0), q_rows * factor, DOT)
        fall += factor * (up + dot(tl.where(mask_t, dm_t, 0.0), right, DOT))
    k_rise = k_rows * rise
    rise *= b[:, None]
    dg = q_rows * dq + k_rows * (rise - fall)
    return dq, rise + fall, k_rise, dg, from_state


@triton.jit
def wide_terms(
    q_rows, k_rows, decay, x, out, r, s_t, ds_t, b, same, enters, leaves,
    C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Bounded gate: what `level_terms` returns.

    dG takes the operands of the products as they were rounded. What a pair adds to its
    row then cancels what it takes from its column, as it must in the sum over tokens.
    """
    since, first, total = wide_exponents(decay, C, WIDE, DOT)
    i, j = grid_ij(C)
    near_mask, far_mask = wide_mask(C, WIDE), level_mask(WIDE, C)
    near_t = (i < j) & (i // WIDE == j // WIDE)
    far_t = (i < WIDE) & (j >= WIDE)
    dp, dl, dp_t, dm_t = pair_gradients(x, out, r, b, same, DOT)
    column = wide_column(since)
    near = (k_rows * column).to(DOT)
    block_end = to_block_end(column, first, total, C, WIDE)
    far = (k_rows * block_end).to(DOT)
    row = wide_row(since)
    pre = tl.where(enters[:, None], from_start(row, first, C, WIDE), 0.0)

    pairs = dot(tl.where(near_mask, dp, 0.0), near, DOT)
    pairs += UNSHIFT * dot(tl.where(far_mask, dp, 0.0), far, DOT)
    states = pre * dot(out, s_t, DOT)
    q_left = (q_rows * row).to(DOT)
    dg = q_left.to(tl.float32) * pairs + q_rows * states
    dq = row * pairs + states

    pairs = dot(tl.where(near_mask, dl, 0.0), near, DOT)
    pairs += UNSHIFT * dot(tl.where(far_mask, dl, 0.0), far, DOT)
    states = pre * dot(r, s_t, DOT)
    k_left = (k_rows * row).to(DOT)
    k_rise = k_left.to(tl.float32) * pairs - k_rows * states
    dg += b[:, None] * k_rise
    dk = b[:, None] * (row * pairs - states)

    pairs = dot(tl.where(near_t, dp_t, 0.0), q_left, DOT)
    pairs += dot(tl.where(near_t, dm_t, 0.0), k_left, DOT)
    dg -= near.to(tl.float32) * pairs
    dk += column * pairs
    pairs = dot(tl.where(far_t, dp_t, 0.0), q_left, DOT)
    pairs += dot(tl.where(far_t, dm_t, 0.0), k_left, DOT)
    pairs *= UNSHIFT
    dg -= far.to(tl.float32) * pairs
    dk += block_end * pairs
    states = dot(x, ds_t, DOT) * to_end(block_end, first, total, C, WIDE)
    states = tl.where(leaves[:, None], states, 0.0)
    from_state = k_rows * states
    return dq, dk + states, k_rise, dg - from_state, from_state


@triton.jit
def grads_kernel(
    q, k, v, g, beta, A_log, dt_bias, ids, do, x_in, s, ds, dr,
    dq_out, dk_out, dv_out, dg_out, dbeta_out, dA_out, dbias_out,
    T, scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    DOT: tl.constexpr = s.dtype.element_ty
    tile = tl.program_id(0)
    h = tile % HV
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, passes = run_masks(ids, n, start, T, C, PACKED)

    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    b = write_strength(raw_b, real, SIGMOID, DOUBLE)
    r = tl.load(dr + tile_offsets(tile, C, V))
    r_wide = r.to(tl.float32)
    db = tl.sum(r_wide * load_rows(v, n, start, h, real, T, HV, V, C), axis=1)
    store_rows(dv_out, b[:, None] * r_wide, n, start, h, T, HV, V, C)
    x = tl.load(x_in + tile_offsets(tile, C, V))
    out = load_rows(do, n, start, h, real, T, HV, V, C).to(DOT)
    own = tl.sum(out.to(tl.float32) * x.to(tl.float32), axis=1)[:, None]
    s_t = tl.load(s + tile_offsets(tile, V, K))
    ds_t = tl.load(ds + tile_offsets(tile, V, K))
    last = tl.sum(s_t.to(tl.float32) * ds_t.to(tl.float32), axis=0)

    z = load_rows(g, n, start, h, real, T, HV, K, C)
    slope = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + tl.arange(0, K)).to(tl.float32)
    decay = log2_decay(z, slope, bias, bound, real, GATE)
    last *= tl.where(passes, exp2(tl.sum(decay, axis=0)), 0.0)
    k_rows = load_rows(k, n, start, h // (HV // H), real, T, H, K, C)
    k_inverse = inverse_norm(k_rows, NORM, C)
    k_rows *= k_inverse[:, None]
    q_rows = load_rows(q, n, start, h // (HV // H), real, T, H, K, C)
    q_inverse = inverse_norm(q_rows, NORM, C)
    q_rows *= (scale * q_inverse)[:, None]
    if WIDE > 0:
        dq, dk, k_rise, dg, from_state = wide_terms(
            q_rows, k_rows, decay, x, out, r, s_t, ds_t, b, same, enters, leaves,
            C, WIDE, DOT,
        )
    else:
        dq, dk, k_rise, dg, from_state = level_terms(
            q_rows, k_rows, decay, x, out, r, s_t, ds_t, b, same, enters, leaves,
            C, DOT,
        )
    # The diagonal of P holds no decay.
    dk = normalise_backward(dk + own * q_rows, k_rows, k_inverse, NORM)
    store_rows(dk_out, dk, n, start, h, T, H=HV, D=K, C=C)
    dq = scale * (dq + own * k_rows)
    dq = normalise_backward(dq, q_rows / scale, q_inverse, NORM)
    store_rows(dq_out, dq, n, start, h, T, HV, K, C)
    db += tl.sum(k_rise, axis=1)
    db = strength_backward(db, raw_b, SIGMOID, DOUBLE).to(dbeta_out.dtype.element_ty)
    tl.store(dbeta_out + at, tl.where(real, db, 0.0), mask=start + tl.arange(0, C) < T)
    i, j = grid_ij(C)
    last += tl.sum(from_state, axis=0)
    dg = stretch_sum((i <= j) & same, dg, DOT)
    dg = tl.where(real[:, None], dg + tl.where(leaves[:, None], last[None, :], 0.0), 0.0)
    dz, dA = gate_backward(dg, z + bias[None, :], slope, bound, GATE)
    store_rows(dg_out, dz, n, start, h, T, HV, K, C)
    vector = tile.to(tl.int64) * K + tl.arange(0, K)
    tl.store(dA_out + vector, tl.sum(dA, axis=0))
    tl.store(dbias_out + vector, tl.sum(dz, axis=0))
