"""Products over V of a chunk's tokens, before `grads.py`: pairs, dv, sums of rows."""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    dot,
    grid_ij,
    load_rows,
    place_of,
    power_of_two,
    real_rows,
    row_pointers,
    run_masks,
    sigmoid,
    store_rows,
    tile_pointers,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def pairs_kernel(
    v, beta, b, ids, do, o, x, dr,
    dv_out, dp_out, dl_out, rows_out, db_out, size_out,
    T,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Per chunk and head: dP and dL below the diagonal, dv, and sums over channels.

    o is linear in q, hence q . dq = do . o. k enters as the row that is read before the
    write, and as the column that is written: k . dk = dR . (X - b V) + dR . X. For a
    write strength b from a sigmoid, b db = dR . X needs no more; for any other, db
    lacks rowsum(k . rise). Rows out: diag(dP), q . dq, k . dk. dP and dL are in units
    of `size`.
    """
    DOT: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    h, n, start = place_of(tile, T, HV, C)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, _, _, _ = run_masks(ids, n, start, T, C, PACKED)
    row = tile.to(tl.int64) * C + tl.arange(0, C)
    # All loads before anything waits for one.
    at = (n.to(tl.int64) * T + start + tl.arange(0, C)) * HV + h
    raw_b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    b_c = tl.load(b + row)
    r = tl.load(tile_pointers(dr, tile, C, V))
    x_c = tl.load(tile_pointers(x, tile, C, V))
    at = row_pointers(do, n, start, h, 0, T, HV, V, C, V)
    out = tl.load(at, mask=real[:, None], other=0.0)
    v_c = load_rows(v, n, start, h, 0, real, T, HV, V, C, V)
    o_c = load_rows(o, n, start, h, 0, real, T, HV, V, C, V)
    wide_out, wide_r, wide_x = out.to(tl.float32), r.to(tl.float32), x_c.to(tl.float32)
    out = out.to(DOT)
    write, db = tl.sum(wide_r * wide_x, axis=1), tl.sum(wide_r * v_c, axis=1)
    store_rows(dv_out, b_c[:, None] * wide_r, n, start, h, 0, T, HV, V, C, V)
    rows = rows_out + tile.to(tl.int64) * (3 * C) + tl.arange(0, C)
    tl.store(rows, tl.sum(wide_out * wide_x, axis=1))
    tl.store(rows + C, tl.sum(wide_out * o_c, axis=1))
    tl.store(rows + 2 * C, 2.0 * write - b_c * db)
    if SIGMOID:
        db = write * (1.0 - sigmoid(raw_b))
    tl.store(db_out + row, tl.where(real, db, 0.0))
    largest = tl.maximum(tl.max(tl.abs(wide_out)), tl.max(tl.abs(wide_r)))
    size = power_of_two(largest)
    tl.store(size_out + tile, size)
    i, j = grid_ij(C)
    below = same & (i > j)
    dp = tl.where(below, dot(out, x_c.T, DOT), 0.0) / size
    tl.store(tile_pointers(dp_out, tile, C, C), dp.to(DOT))
    dl = tl.where(below, dot(r, x_c.T, DOT), 0.0) * (-1.0 / size)
    tl.store(tile_pointers(dl_out, tile, C, C), dl.to(DOT))
