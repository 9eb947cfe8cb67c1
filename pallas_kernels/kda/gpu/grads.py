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
    anew,
    dot,
    exp2,
    from_start,
    grid_ij,
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
    wide_row,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def gate_backward(dg, z, slope, bound, GATE: tl.constexpr):
    """Gradient by the gate's logits, and its part of that by A_log, [C,K] each."""
    if GATE == "bounded":
        s = sigmoid(slope * z)
        dz = dg * (bound * slope) * s * (1.0 - s)
        return dz, dz * z
    elif GATE == "softplus":
        return -dg * slope * sigmoid(z), -dg * slope * softplus(z)
    else:
        return dg, dg


@triton.jit
def load_near(pairs, tile, C: tl.constexpr, WIDE: tl.constexpr):
    """Pairs inside blocks of WIDE tokens."""
    i, j = grid_ij(C)
    same_block = i // WIDE == j // WIDE
    return tl.load(pairs + tile_offsets(anew(tile), C, C), mask=same_block, other=0.0)


@triton.jit
def load_far(pairs, tile, C: tl.constexpr, WIDE: tl.constexpr):
    """Pairs of different blocks."""
    i, j = grid_ij(C)
    other_block = i // WIDE != j // WIDE
    return tl.load(pairs + tile_offsets(anew(tile), C, C), mask=other_block, other=0.0)


@triton.jit
def state_product(rows, states, tile, column, C: tl.constexpr, K: tl.constexpr,
                  V: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr):
    """[C,V] rows times W columns of a transposed state.

    Waits for the warps, so that the state is not loaded before registers are free.
    """
    tl.debug_barrier()
    at = anew(tile).to(tl.int64) * (V * K) + column
    at = at + tl.arange(0, V)[:, None] * K + tl.arange(0, W)[None, :]
    return dot(rows, tl.load(states + at), DOT)


@triton.jit
def scaled_rows(
    ptr, factor, n, start, h, column, real, T,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """Rows times one factor each; loaded anew wherever it is written."""
    tl.debug_barrier()
    rows = load_rows(ptr, n, anew(start), h, column, real, T, H, D, C, W)
    return rows * factor[:, None]


@triton.jit
def level_terms(
    q, k, decay, do, x_in, dr, s, ds, dp, dl, dq_out, dk_out, tile, n, start, h, column,
    real, b, enters, leaves, own, k_inverse, q_factor, scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: writes dq and dk before the norms.

    Returns rowsum(k . rise), rowsum(q . dq), rowsum(k . dk), dG, and what the last row
    of dG gets on top. dG takes the operands of the products as they were rounded. What
    a pair adds to its row then cancels what it takes from its column, as it must in the
    sum over tokens.
    """
    key = h // (HV // H)
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    q_rows = scaled_rows(q, q_factor, n, start, key, column, real, T, H, K, C, W)
    pre, post = outer_factors(decay, C, DOT)
    pre = tl.where(enters[:, None], pre, 0.0)
    post = tl.where(leaves[:, None], post, 0.0)
    out = load_rows(do, n, anew(start), h, 0, real, T, HV, V, C, V)
    dq = pre * state_product(out, s, tile, column, C, K, V, W, DOT)
    r = tl.load(dr + tile_offsets(anew(tile), C, V))
    rise = -pre * state_product(r, s, tile, column, C, K, V, W, DOT)
    x = tl.load(x_in + tile_offsets(anew(tile), C, V))
    fall = post * state_product(x, ds, tile, column, C, K, V, W, DOT)
    from_state = tl.sum(k_rows * fall, axis=0)
    dg = q_rows * dq + k_rows * (b[:, None] * rise - fall)
    square = tile_offsets(tile, C, C)
    for level in range(levels(C)):
        factor = pair_factor(decay, level, C, DOT)
        mask = level_mask(1 << level, C)
        left, right = (q_rows * factor).to(DOT), (k_rows * factor).to(DOT)
        scaled = (b[:, None] * k_rows * factor).to(DOT)
        p_pairs = tl.where(mask, tl.load(dp + square), 0.0).to(DOT)
        l_pairs = tl.where(mask, tl.load(dl + square), 0.0).to(DOT)
        pairs = dot(p_pairs, right, DOT)
        dq += factor * pairs
        dg += left.to(tl.float32) * pairs
        pairs = dot(l_pairs, right, DOT)
        rise += factor * pairs
        dg += scaled.to(tl.float32) * pairs
        pairs = dot(p_pairs.T, left, DOT) + dot(l_pairs.T, scaled, DOT)
        fall += factor * pairs
        dg -= right.to(tl.float32) * pairs
    k_rise = tl.sum(k_rows * rise, axis=1)
    rise *= b[:, None]
    # The diagonal of P holds no decay.
    dk = rise + fall + own[:, None] * q_rows
    dq += own[:, None] * k_rows
    store_rows(dk_out, dk, n, anew(start), h, column, T, HV, K, C, W)
    store_rows(dq_out, scale * dq, n, anew(start), h, column, T, HV, K, C, W)
    q_dq, k_dk = tl.sum(q_rows * dq, axis=1), tl.sum(k_rows * dk, axis=1)
    return k_rise, q_dq, k_dk, dg, from_state


@triton.jit
def wide_queries(
    q, k, since, first, near, far, do, s, dp, dq_out, tile, n, start, h, column, real,
    enters, own, k_inverse, q_factor, scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Writes dq before the norm. Returns q as rows, dG so far, rowsum(q . dq)."""
    key = h // (HV // H)
    q_rows = scaled_rows(q, q_factor, n, start, key, column, real, T, H, K, C, W)
    factor = wide_row(since)
    pairs = dot(load_near(dp, tile, C, WIDE), near, DOT)
    pairs += dot(load_far(dp, tile, C, WIDE), far, DOT) * UNSHIFT
    q_left = (q_rows * factor).to(DOT)
    dg = q_left.to(tl.float32) * pairs
    dq = factor * pairs
    pre = tl.where(enters[:, None], from_start(factor, first, C, WIDE), 0.0)
    out = load_rows(do, n, anew(start), h, 0, real, T, HV, V, C, V)
    states = pre * state_product(out, s, tile, column, C, K, V, W, DOT)
    dg += q_rows * states
    # The diagonal of P holds no decay.
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    dq += states + own[:, None] * k_rows
    store_rows(dq_out, scale * dq, n, anew(start), h, column, T, HV, K, C, W)
    return q_left, dg, tl.sum(q_rows * dq, axis=1)


@triton.jit
def wide_rises(
    k, since, first, near, far, dr, s, dl, dg, tile, n, start, key, column, real, b,
    enters, k_inverse, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Returns b k as rows, dG so far, b rise, rowsum(k . rise)."""
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    factor = wide_row(since)
    pairs = dot(load_near(dl, tile, C, WIDE), near, DOT)
    pairs += dot(load_far(dl, tile, C, WIDE), far, DOT) * UNSHIFT
    pre = tl.where(enters[:, None], from_start(factor, first, C, WIDE), 0.0)
    r = tl.load(dr + tile_offsets(anew(tile), C, V))
    states = pre * state_product(r, s, tile, column, C, K, V, W, DOT)
    k_left = (b[:, None] * k_rows * factor).to(DOT)
    dg += k_left.to(tl.float32) * pairs - b[:, None] * k_rows * states
    rise = factor * pairs - states
    return k_left, dg, b[:, None] * rise, tl.sum(k_rows * rise, axis=1)


@triton.jit
def wide_falls(
    k, since, first, total, q_left, k_left, x_in, ds, dp, dl, dg, dk, tile, n, start,
    key, column, real, leaves, k_inverse, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Returns dG but for its last row's share, dk but for diag(dP), and that share."""
    factor = wide_column(since)
    pairs = dot(load_near(dp, tile, C, WIDE).T, q_left, DOT)
    pairs += dot(load_near(dl, tile, C, WIDE).T, k_left, DOT)
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    dg -= (k_rows * factor).to(DOT).to(tl.float32) * pairs
    dk += factor * pairs
    factor = to_block_end(factor, first, total, C, WIDE)
    pairs = dot(load_far(dp, tile, C, WIDE).T, q_left, DOT)
    pairs += dot(load_far(dl, tile, C, WIDE).T, k_left, DOT)
    pairs *= UNSHIFT
    dg -= (k_rows * factor).to(DOT).to(tl.float32) * pairs
    dk += factor * pairs
    x = tl.load(x_in + tile_offsets(anew(tile), C, V))
    states = state_product(x, ds, tile, column, C, K, V, W, DOT)
    states *= to_end(factor, first, total, C, WIDE)
    states = tl.where(leaves[:, None], states, 0.0)
    from_state = k_rows * states
    return dg - from_state, dk + states, tl.sum(from_state, axis=0)


@triton.jit
def wide_terms(
    q, k, decay, do, x_in, dr, s, ds, dp, dl, dq_out, dk_out, tile, n, start, h, column,
    real, b, enters, leaves, own, k_inverse, q_factor, scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Bounded gate: does what `level_terms` does.

    Registers are short, so rows are loaded and factors computed anew in each phase.
    """
    key = h // (HV // H)
    since, first, total = wide_exponents(decay, C, WIDE, False, DOT)
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    factor = wide_column(since)
    near = (k_rows * factor).to(DOT)
    far = (k_rows * to_block_end(factor, first, total, C, WIDE)).to(DOT)
    q_left, dg, q_dq = wide_queries(
        q, k, since, first, near, far, do, s, dp, dq_out, tile, n, start, h, column,
        real, enters, own, k_inverse, q_factor, scale, T, H, HV, K, V, C, W, WIDE, DOT,
    )
    k_left, dg, dk, k_rise = wide_rises(
        k, since, first, near, far, dr, s, dl, dg, tile, n, start, key, column, real, b,
        enters, k_inverse, T, H, K, V, C, W, WIDE, DOT,
    )
    dg, dk, from_state = wide_falls(
        k, since, first, total, q_left, k_left, x_in, ds, dp, dl, dg, dk, tile, n,
        start, key, column, real, leaves, k_inverse, T, H, K, V, C, W, WIDE, DOT,
    )
    q_rows = scaled_rows(q, q_factor, n, start, key, column, real, T, H, K, C, W)
    k_rows = scaled_rows(k, k_inverse, n, start, key, column, real, T, H, K, C, W)
    dk += own[:, None] * q_rows
    store_rows(dk_out, dk, n, anew(start), h, column, T, HV, K, C, W)
    return k_rise, q_dq, tl.sum(k_rows * dk, axis=1), dg, from_state


@triton.jit
def decay_part(
    g, A_log, dt_bias, bound, real, n, start, h, column, T,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    GATE: tl.constexpr,
):
    """Logits of the gate, their slope, and log2 decay, for W channels."""
    z = load_rows(g, n, anew(start), h, column, real, T, HV, K, C, W)
    slope = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + column + tl.arange(0, W)).to(tl.float32)
    return z + bias[None, :], slope, log2_decay(z, slope, bias, bound, real, GATE)


@triton.jit
def finish_gate(
    g, A_log, dt_bias, dg_out, dA_out, dbias_out, dg, last, same, leaves, real, bound,
    tile, n, start, h, column, T,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr,
):
    """From the gradient by G to those by g, A_log and dt_bias."""
    tl.debug_barrier()
    z, slope, _ = decay_part(
        g, A_log, dt_bias, bound, real, n, start, h, column, T, HV, K, C, W, GATE
    )
    i, j = grid_ij(C)
    dg = stretch_sum((i <= j) & same, dg, DOT)
    dg += tl.where(leaves[:, None], last[None, :], 0.0)
    dz, dA = gate_backward(
        tl.where(real[:, None], dg, 0.0), z, slope, bound, GATE
    )
    store_rows(dg_out, dz, n, anew(start), h, column, T, HV, K, C, W)
    vector = tile.to(tl.int64) * K + column + tl.arange(0, W)
    tl.store(dA_out + vector, tl.sum(dA, axis=0))
    tl.store(dbias_out + vector, tl.sum(dz, axis=0))


@triton.jit
def grads_kernel(
    q, k, g, A_log, dt_bias, ids, do, x_in, s, ds, dr, dp, dl, b_in, rows_in,
    dq_out, dk_out, dg_out, dA_out, dbias_out, sums_out,
    T, scale, bound, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Per chunk, head and W channels, as registers hold no more.

    Writes dg, and dq and dk before the norms; and rowsum(k . rise), rowsum(q . dq) and
    rowsum(k . dk) over the W channels, which only `finish_kernel` can add up.
    """
    DOT: tl.constexpr = s.dtype.element_ty
    part = tl.program_id(0) % (K // W)
    tile, column = tl.program_id(0) // (K // W), part * W
    h = tile % HV
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, passes = run_masks(ids, n, start, T, C, PACKED)
    row = tile.to(tl.int64) * C + tl.arange(0, C)
    b = tl.load(b_in + row)
    row = tile.to(tl.int64) * (3 * C) + tl.arange(0, C)
    own = tl.load(rows_in + row)
    q_factor = scale * tl.load(rows_in + row + C)
    k_inverse = tl.load(rows_in + row + 2 * C)
    at = anew(tile).to(tl.int64) * (V * K) + column
    at = at + tl.arange(0, V)[:, None] * K + tl.arange(0, W)[None, :]
    both = tl.load(s + at).to(tl.float32) * tl.load(ds + at).to(tl.float32)
    last = tl.sum(both, axis=0)
    tl.debug_barrier()
    _, _, decay = decay_part(
        g, A_log, dt_bias, bound, real, n, start, h, column, T, HV, K, C, W, GATE
    )
    last *= tl.where(passes, exp2(tl.sum(decay, axis=0)), 0.0)
    if WIDE > 0:
        k_rise, q_dq, k_dk, dg, more = wide_terms(
            q, k, decay, do, x_in, dr, s, ds, dp, dl, dq_out, dk_out, tile, n, start, h,
            column, real, b, enters, leaves, own, k_inverse, q_factor, scale, T,
            H, HV, K, V, C, W, WIDE, DOT,
        )
    else:
        k_rise, q_dq, k_dk, dg, more = level_terms(
            q, k, decay, do, x_in, dr, s, ds, dp, dl, dq_out, dk_out, tile, n, start, h,
            column, real, b, enters, leaves, own, k_inverse, q_factor, scale, T,
            H, HV, K, V, C, W, DOT,
        )
    sums = sums_out + (part.to(tl.int64) * N + tile) * (3 * C) + tl.arange(0, C)
    tl.store(sums, k_rise)
    tl.store(sums + C, q_dq)
    tl.store(sums + 2 * C, k_dk)
    finish_gate(
        g, A_log, dt_bias, dg_out, dA_out, dbias_out, dg, last + more, same, leaves,
        real, bound, tile, n, start, h, column, T, HV, K, C, W, GATE, DOT,
    )
