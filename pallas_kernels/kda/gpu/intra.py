"""All that a chunk needs before its state is known, one program a chunk and head.

For any gate; `bounded_intra.py` does it in a third of the products, for a bounded one.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    dot,
    exp2,
    grid_ij,
    level_mask,
    levels,
    load_rows,
    log2_decay,
    outer_factors,
    pair_factor,
    place_of,
    real_rows,
    run_masks,
    tile_pointers,
    unit_lower_inverse,
    write_strength,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def level_tiles(
    q, k, decay, b, q_factor, k_inverse, enters, leaves, passes, real, kq_out,
    kr_out, gam_out, tile, n, start, h, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: writes Kb, Qp, Kr and gam; returns M and P below the diagonal."""
    gam = tl.where(passes, exp2(tl.sum(decay, axis=0)), 0.0)
    tl.store(gam_out + tile.to(tl.int64) * K + tl.arange(0, K), gam)
    k_rows = load_rows(k, n, start, h, 0, real, T, H, K, C, K) * k_inverse[:, None]
    q_rows = load_rows(q, n, start, h, 0, real, T, H, K, C, K) * q_factor[:, None]
    pre, post = outer_factors(decay, C, DOT)
    kb = tl.where(enters[:, None], b[:, None] * k_rows * pre, 0.0)
    tl.store(tile_pointers(kq_out, 2 * tile, C, K), kb.to(DOT))
    qp = tl.where(enters[:, None], q_rows * pre, 0.0)
    tl.store(tile_pointers(kq_out, 2 * tile + 1, C, K), qp.to(DOT))
    kr = tl.where(leaves[:, None], k_rows * post, 0.0)
    tl.store(tile_pointers(kr_out, tile, C, K), kr.to(DOT))
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
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
):
    """What normalises q and k, and q . k of the raw rows, [C] each."""
    q_rows = load_rows(q, n, start, h, 0, real, T, H, K, C, K)
    k_rows = load_rows(k, n, start, h, 0, real, T, H, K, C, K)
    qk = tl.sum(q_rows * k_rows, axis=1)
    if NORM:
        qq, kk = tl.sum(q_rows * q_rows, axis=1), tl.sum(k_rows * k_rows, axis=1)
        return tl.rsqrt(qq + 1e-6), tl.rsqrt(kk + 1e-6), qk
    else:
        one = tl.full([C], 1.0, tl.float32)
        return one, one, qk


@triton.jit
def finish(
    m, p, own, b, a_out, p_out, tile, C: tl.constexpr, DOT: tl.constexpr,
):
    """Writes A - I and P from pairs below the diagonal, and own [C] on that of P.

    What A leaves as it is need not be rounded for a product: see `scan.py`.
    Pairs of two runs must be 0.
    """
    i, j = grid_ij(C)
    p = tl.where(i > j, p, tl.where(i == j, own[:, None], 0.0))
    tl.store(tile_pointers(p_out, tile, C, C), p.to(DOT))
    lower = tl.where(i > j, b[:, None] * m, 0.0)
    INV: tl.constexpr = tl.float16 if tl.bfloat16 == DOT else tl.float32
    a = unit_lower_inverse(lower, C, INV)
    a -= tl.where(i == j, 1.0, 0.0)
    tl.store(tile_pointers(a_out, tile, C, C), a.to(DOT))


@triton.jit
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, ids,
    a_out, p_out, kq_out, kr_out, gam_out, b_out, norms_out,
    T, scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr, PACKED: tl.constexpr,
):
    """Writes tiles of A - I, P, Kb = b Kp with Qp below it, Kr, and gam and b.

    For `grads.py` also the factors that normalise q and k.
    """
    DOT: tl.constexpr = kq_out.dtype.element_ty
    tile = tl.program_id(0)
    h, n, start = place_of(tile, T, HV, C)
    key = h // (HV // H)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, passes = run_masks(ids, n, start, T, C, PACKED)
    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    b = write_strength(raw_b, real, SIGMOID, DOUBLE)
    tl.store(b_out + tile.to(tl.int64) * C + tl.arange(0, C), b)
    q_inverse, k_inverse, qk = row_products(
        q, k, n, start, key, real, T, H, K, C, NORM
    )
    row = norms_out + tile.to(tl.int64) * (2 * C) + tl.arange(0, C)
    tl.store(row, q_inverse)
    tl.store(row + C, k_inverse)
    q_factor = scale * q_inverse
    raw_g = load_rows(g, n, start, h, 0, real, T, HV, K, C, K)
    slope = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + tl.arange(0, K)).to(tl.float32)
    decay = log2_decay(raw_g, slope, bias[None, :], bound, real[:, None], GATE)
    m, p = level_tiles(
        q, k, decay, b, q_factor, k_inverse, enters, leaves, passes, real, kq_out,
        kr_out, gam_out, tile, n, start, key, T, H, K, C, DOT,
    )
    own = qk * q_factor * k_inverse
    if PACKED:
        m, p = tl.where(same, m, 0.0), tl.where(same, p, 0.0)
    finish(m, p, own, b, a_out, p_out, tile, C, DOT)
