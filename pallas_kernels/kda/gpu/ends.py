"""What frames `grads.py`: the products of token pairs before it, the norms after it."""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    dot,
    grid_ij,
    inverse_norm,
    load_rows,
    real_rows,
    run_masks,
    sigmoid,
    store_rows,
    tile_offsets,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


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
def pairs_kernel(
    q, k, v, b_in, ids, do, x_in, dr,
    dv_out, dp, dl, rows_out, db_out,
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):
    """Per chunk and head: dP and dL below the diagonal, dv, rowsum(dR . V).

    Writes diag(dP) and what q and k are multiplied by to be normalised as rows.
    """
    DOT: tl.constexpr = x_in.dtype.element_ty
    tile = tl.program_id(0)
    h = tile % HV
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, _, _, _ = run_masks(ids, n, start, T, C, PACKED)
    row = tile.to(tl.int64) * C + tl.arange(0, C)
    b = tl.load(b_in + row)
    r = tl.load(dr + tile_offsets(tile, C, V))
    wide_r = r.to(tl.float32)
    db = tl.sum(wide_r * load_rows(v, n, start, h, 0, real, T, HV, V, C, V), axis=1)
    store_rows(dv_out, b[:, None] * wide_r, n, start, h, 0, T, HV, V, C, V)
    x = tl.load(x_in + tile_offsets(tile, C, V))
    out = load_rows(do, n, start, h, 0, real, T, HV, V, C, V).to(DOT)
    i, j = grid_ij(C)
    below = same & (i > j)
    square = tile_offsets(tile, C, C)
    tl.store(dp + square, tl.where(below, dot(out, x.T, DOT), 0.0).to(DOT))
    tl.store(dl + square, tl.where(below, -dot(r, x.T, DOT), 0.0).to(DOT))
    tl.store(db_out + row, db)
    row = tile.to(tl.int64) * (3 * C) + tl.arange(0, C)
    own = tl.sum(out.to(tl.float32) * x.to(tl.float32), axis=1)
    tl.store(rows_out + row, own)
    key = h // (HV // H)
    q_rows = load_rows(q, n, start, key, 0, real, T, H, K, C, K)
    tl.store(rows_out + row + C, inverse_norm(q_rows, NORM, C))
    k_rows = load_rows(k, n, start, key, 0, real, T, H, K, C, K)
    tl.store(rows_out + row + 2 * C, inverse_norm(k_rows, NORM, C))


@triton.jit
def normalise_backward(
    dy, dx, x, y_dy, n, start, h, real, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):
    """Writes the gradient by x, from that by y = x * inverse_norm(x)."""
    rows = load_rows(x, n, start, h // (HV // H), 0, real, T, H, K, C, K)
    inverse = inverse_norm(rows, True, C)
    grad = load_rows(dy, n, start, h, 0, real, T, HV, K, C, K)
    grad = (grad - rows * (inverse * y_dy)[:, None]) * inverse[:, None]
    store_rows(dx, grad, n, start, h, 0, T, HV, K, C, K)


@triton.jit
def finish_kernel(
    q, k, beta, ids, sums, db_in, dy_q, dy_k,
    dq_out, dk_out, dbeta_out,
    T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Per chunk and head: what needs sums over all channels. Norms and beta."""
    tile = tl.program_id(0)
    h = tile % HV
    chunks = tl.cdiv(T, C)
    start = (tile // HV) % chunks * C
    n = tile // (HV * chunks)
    real = real_rows(ids, n, start, T, C, PACKED)
    db = tl.load(db_in + tile.to(tl.int64) * C + tl.arange(0, C))
    q_dq, k_dk = tl.zeros_like(db), tl.zeros_like(db)
    for part in tl.static_range(K // W):
        at = sums + (tl.cast(N, tl.int64) * part + tile) * (3 * C) + tl.arange(0, C)
        db += tl.load(at)
        q_dq += tl.load(at + C)
        k_dk += tl.load(at + 2 * C)
    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    db = strength_backward(db, raw_b, SIGMOID, DOUBLE).to(dbeta_out.dtype.element_ty)
    tl.store(dbeta_out + at, tl.where(real, db, 0.0), mask=start + tl.arange(0, C) < T)
    if NORM:
        normalise_backward(dy_q, dq_out, q, q_dq, n, start, h, real, T, H, HV, K, C)
        normalise_backward(dy_k, dk_out, k, k_dk, n, start, h, real, T, H, HV, K, C)
