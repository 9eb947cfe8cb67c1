"""All that a chunk needs before its state is known, one program a chunk and head."""

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
    tile_offsets,
    to_block_end,
    to_end,
    unit_lower_inverse,
    wide_column,
    wide_exponents,
    wide_mask,
    wide_row,
    write_strength,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def level_tiles(
    q, k, decay, b, enters, leaves, real, kb_out, qp_out, kr_out, tile, n, start, h, T,
    scale, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Any gate: writes Kb, Qp and Kr; returns M and P."""
    k_rows = load_rows(k, n, start, h, 0, real, T, H, K, C, K)
    k_rows *= inverse_norm(k_rows, NORM, C)[:, None]
    q_rows = load_rows(q, n, start, h, 0, real, T, H, K, C, K)
    q_rows *= (scale * inverse_norm(q_rows, NORM, C))[:, None]
    pre, post = outer_factors(decay, C, DOT)
    wide = tile_offsets(tile, C, K)
    kb = tl.where(enters[:, None], b[:, None] * k_rows * pre, 0.0)
    tl.store(kb_out + wide, kb.to(DOT))
    tl.store(qp_out + wide, tl.where(enters[:, None], q_rows * pre, 0.0).to(DOT))
    tl.store(kr_out + wide, tl.where(leaves[:, None], k_rows * post, 0.0).to(DOT))
    i, j = grid_ij(C)
    m = tl.zeros([C, C], tl.float32)
    p = tl.where(i == j, tl.sum(q_rows * k_rows, axis=1)[:, None], 0.0)
    for level in range(levels(C)):
        factor = pair_factor(decay, level, C, DOT)
        right = (k_rows * factor).to(DOT)
        m = tl.where(level_mask(1 << level, C), dot(right, right.T, DOT), m)
        p = tl.where(level_mask(1 << level, C), dot(q_rows * factor, right.T, DOT), p)
    return m, p


@triton.jit
def wide_tiles(
    q, k, decay, b, enters, leaves, real, kb_out, qp_out, kr_out, tile, n, start, h, T,
    scale, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr,
):
    """Bounded gate: writes Kb, Qp and Kr; returns M and P."""
    k_rows = load_rows(k, n, start, h, 0, real, T, H, K, C, K)
    q_rows = load_rows(q, n, start, h, 0, real, T, H, K, C, K)
    k_inverse = inverse_norm(k_rows, NORM, C)
    q_inverse = scale * inverse_norm(q_rows, NORM, C)
    own = tl.sum(q_rows * k_rows, axis=1) * k_inverse * q_inverse
    since, first, total = wide_exponents(decay, C, WIDE, True, DOT)
    wide = tile_offsets(tile, C, K)
    column = k_rows * k_inverse[:, None] * wide_column(since)
    near = column.to(DOT)
    column = to_block_end(column, first, total, C, WIDE)
    far = column.to(DOT)
    kr = to_end(column, first, total, C, WIDE)
    tl.store(kr_out + wide, tl.where(leaves[:, None], kr, 0.0).to(DOT))
    row_factor = wide_row(since)
    row = k_rows * k_inverse[:, None] * row_factor
    kb = b[:, None] * from_start(row, first, C, WIDE)
    tl.store(kb_out + wide, tl.where(enters[:, None], kb, 0.0).to(DOT))
    m = join_blocks(row.to(DOT), near, far, C, WIDE, DOT)
    row = q_rows * q_inverse[:, None] * row_factor
    qp = tl.where(enters[:, None], from_start(row, first, C, WIDE), 0.0)
    tl.store(qp_out + wide, qp.to(DOT))
    p = join_blocks(row.to(DOT), near, far, C, WIDE, DOT)
    i, j = grid_ij(C)
    return m, tl.where(i == j, own[:, None], p)


@triton.jit
def join_blocks(row, near, far, C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr):
    """[C,C] below the diagonal: blocks on the diagonal, and those left of them."""
    x = tl.where(wide_mask(C, WIDE), dot(row, near.T, DOT), 0.0)
    if C > WIDE:
        x = tl.where(level_mask(WIDE, C), dot(row, far.T, DOT) * UNSHIFT, x)
    return x


@triton.jit
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, ids,
    a_out, p_out, qp_out, kb_out, kr_out, gam_out, b_out,
    T, scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes tiles of A, P, Qp, Kb = b Kp, Kr and vectors gam and b."""
    DOT: tl.constexpr = qp_out.dtype.element_ty
    tile = tl.program_id(0)
    h = tile % HV
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, passes = run_masks(ids, n, start, T, C, PACKED)

    raw_g = load_rows(g, n, start, h, 0, real, T, HV, K, C, K)
    slope = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + tl.arange(0, K)).to(tl.float32)
    decay = log2_decay(raw_g, slope, bias, bound, real, GATE)
    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    b = write_strength(raw_b, real, SIGMOID, DOUBLE)
    tl.store(b_out + tile.to(tl.int64) * C + tl.arange(0, C), b)

    if WIDE > 0:
        m, p = wide_tiles(
            q, k, decay, b, enters, leaves, real, kb_out, qp_out, kr_out, tile, n,
            start, h // (HV // H), T, scale, H, K, C, WIDE, NORM, DOT,
        )
    else:
        m, p = level_tiles(
            q, k, decay, b, enters, leaves, real, kb_out, qp_out, kr_out, tile, n,
            start, h // (HV // H), T, scale, H, K, C, NORM, DOT,
        )
    gam = tl.where(passes, exp2(tl.sum(decay, axis=0)), 0.0)
    tl.store(gam_out + tile.to(tl.int64) * K + tl.arange(0, K), gam)
    square = tile_offsets(tile, C, C)
    tl.store(p_out + square, tl.where(same, p, 0.0).to(DOT))
    lower = tl.where(same, b[:, None] * m, 0.0)
    INV: tl.constexpr = tl.float16 if tl.bfloat16 == DOT else tl.float32
    tl.store(a_out + square, unit_lower_inverse(lower, C, INV).to(DOT))
