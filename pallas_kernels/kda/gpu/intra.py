"""All that a chunk needs before its state is known, one program a chunk and head."""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    UNSHIFT,
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
    tile_offsets,
    to_block_end,
    to_end,
    unit_lower_inverse,
    wide_column,
    wide_exponents,
    wide_row,
    write_strength,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def level_tiles(
    q, k, decay, b, q_factor, k_inverse, enters, leaves, real, kb_out, qp_out, kr_out,
    tile, n, start, h, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: writes Kb, Qp and Kr; returns M and P below the diagonal."""
    k_rows = load_rows(k, n, start, h, 0, real, T, H, K, C, K) * k_inverse[:, None]
    q_rows = load_rows(q, n, start, h, 0, real, T, H, K, C, K) * q_factor[:, None]
    pre, post = outer_factors(decay, C, DOT)
    wide = tile_offsets(tile, C, K)
    kb = tl.where(enters[:, None], b[:, None] * k_rows * pre, 0.0)
    tl.store(kb_out + wide, kb.to(DOT))
    tl.store(qp_out + wide, tl.where(enters[:, None], q_rows * pre, 0.0).to(DOT))
    tl.store(kr_out + wide, tl.where(leaves[:, None], k_rows * post, 0.0).to(DOT))
    m, p = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for level in range(levels(C)):
        factor = pair_factor(decay, level, C, DOT)
        right = (k_rows * factor).to(DOT)
        m = tl.where(level_mask(1 << level, C), dot(right, right.T, DOT), m)
        p = tl.where(level_mask(1 << level, C), dot(q_rows * factor, right.T, DOT), p)
    return m, p


@triton.jit
def row_products(
    q, k, n, start, h, real, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr,
):
    """What normalises q and k, and q . k of the raw rows, [C] each."""
    qq, kk = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    qk = tl.zeros([C], tl.float32)
    for column in tl.static_range(0, K, W):
        q_rows = load_rows(q, n, start, h, column, real, T, H, K, C, W)
        k_rows = load_rows(k, n, start, h, column, real, T, H, K, C, W)
        qk += tl.sum(q_rows * k_rows, axis=1)
        if NORM:
            qq += tl.sum(q_rows * q_rows, axis=1)
            kk += tl.sum(k_rows * k_rows, axis=1)
    if NORM:
        return tl.rsqrt(qq + 1e-6), tl.rsqrt(kk + 1e-6), qk
    else:
        return qq + 1.0, kk + 1.0, qk


@triton.jit
def wide_part(
    q, k, g, A_log, dt_bias, kb_out, qp_out, kr_out, gam_out, sums_out, m, p, b,
    q_factor, k_inverse, enters, leaves, passes, real, tile, n, start, h, column, T,
    bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr,
):
    """Bounded gate, W channels: writes Kb, Qp, Kr, gam; adds to M and P."""
    decay = decay_part(
        g, A_log, dt_bias, bound, real, n, start, h, column, T, HV, K, C, W, GATE
    )
    since, first, rest = wide_exponents(decay, C, WIDE)
    vector = tile.to(tl.int64) * (2 * K) + column + tl.arange(0, W)
    tl.store(sums_out + vector, first)
    tl.store(sums_out + vector + K, rest)
    vector = tile.to(tl.int64) * K + column + tl.arange(0, W)
    tl.store(gam_out + vector, tl.where(passes, exp2(first + rest), 0.0))
    part = column + tl.arange(0, C)[:, None] * K + tl.arange(0, W)[None, :]
    part += tile.to(tl.int64) * (C * K)
    key = h // (HV // H)
    k_rows = load_rows(k, n, start, key, column, real, T, H, K, C, W)
    k_rows *= k_inverse[:, None]
    factor = k_rows * wide_column(since)
    near = factor.to(DOT)
    factor = to_block_end(factor, first, rest, C, WIDE)
    far = factor.to(DOT)
    factor = to_end(factor, rest, C, WIDE)
    tl.store(kr_out + part, tl.where(leaves[:, None], factor, 0.0).to(DOT))
    row_factor = wide_row(since)
    row = k_rows * row_factor
    kb = b[:, None] * from_start(row, first, C, WIDE)
    tl.store(kb_out + part, tl.where(enters[:, None], kb, 0.0).to(DOT))
    m = join_blocks(m, row.to(DOT), near, far, C, WIDE, DOT)
    row = load_rows(q, n, start, key, column, real, T, H, K, C, W)
    row *= q_factor[:, None] * row_factor
    qp = tl.where(enters[:, None], from_start(row, first, C, WIDE), 0.0)
    tl.store(qp_out + part, qp.to(DOT))
    return m, join_blocks(p, row.to(DOT), near, far, C, WIDE, DOT)


@triton.jit
def join_blocks(
    x, row, near, far, C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr
):
    """Adds to [C,C]: blocks on the diagonal, and those left of them."""
    more = dot(row, near.T, DOT)
    if C > WIDE:
        more = tl.where(level_mask(WIDE, C), dot(row, far.T, DOT) * UNSHIFT, more)
    return x + more


@triton.jit
def decay_part(
    g, A_log, dt_bias, bound, real, n, start, h, column, T,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    GATE: tl.constexpr,
):
    """Log2 decay of W channels."""
    raw = load_rows(g, n, start, h, column, real, T, HV, K, C, W)
    slope = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + column + tl.arange(0, W)).to(tl.float32)
    return log2_decay(raw, slope, bias, bound, real, GATE)


@triton.jit
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, ids,
    a_out, p_out, qp_out, kb_out, kr_out, gam_out, b_out, norms_out, sums_out,
    T, scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes tiles of A, P, Qp, Kb = b Kp, Kr and vectors gam and b.

    For `grads.py` also the factors that normalise q and k, and, for a bounded gate, the
    log2 decays of the first block and of the rest.
    """
    DOT: tl.constexpr = qp_out.dtype.element_ty
    tile = tl.program_id(0)
    h = tile % HV
    key = h // (HV // H)
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, passes = run_masks(ids, n, start, T, C, PACKED)
    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    b = write_strength(raw_b, real, SIGMOID, DOUBLE)
    tl.store(b_out + tile.to(tl.int64) * C + tl.arange(0, C), b)
    q_inverse, k_inverse, qk = row_products(
        q, k, n, start, key, real, T, H, K, C, W, NORM
    )
    row = norms_out + tile.to(tl.int64) * (2 * C) + tl.arange(0, C)
    tl.store(row, q_inverse)
    tl.store(row + C, k_inverse)
    q_factor = scale * q_inverse
    i, j = grid_ij(C)
    if WIDE > 0:
        m = tl.zeros([C, C], tl.float32)
        p = tl.zeros([C, C], tl.float32)
        for column in tl.static_range(0, K, W):
            m, p = wide_part(
                q, k, g, A_log, dt_bias, kb_out, qp_out, kr_out, gam_out, sums_out, m,
                p, b, q_factor, k_inverse, enters, leaves, passes, real, tile, n, start,
                h, column, T, bound, H, HV, K, C, W, WIDE, GATE, DOT,
            )
    else:
        decay = decay_part(
            g, A_log, dt_bias, bound, real, n, start, h, 0, T, HV, K, C, K, GATE
        )
        gam = tl.where(passes, exp2(tl.sum(decay, axis=0)), 0.0)
        tl.store(gam_out + tile.to(tl.int64) * K + tl.arange(0, K), gam)
        m, p = level_tiles(
            q, k, decay, b, q_factor, k_inverse, enters, leaves, real, kb_out, qp_out,
            kr_out, tile, n, start, key, T, H, K, C, DOT,
        )
    square = tile_offsets(tile, C, C)
    own = (qk * q_factor * k_inverse)[:, None]
    p = tl.where(i > j, p, tl.where(i == j, own, 0.0))
    tl.store(p_out + square, tl.where(same, p, 0.0).to(DOT))
    lower = tl.where(same & (i > j), b[:, None] * m, 0.0)
    INV: tl.constexpr = tl.float16 if tl.bfloat16 == DOT else tl.float32
    tl.store(a_out + square, unit_lower_inverse(lower, C, INV).to(DOT))
