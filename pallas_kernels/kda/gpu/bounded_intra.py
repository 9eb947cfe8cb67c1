"""What `intra.py` does, for a bounded gate and bfloat16.

Tiles are [R,8,K]: token i * R + r of a chunk lies at [r,i]. Threads share out the
second axis, so that each holds R neighbouring tokens, and sums over tokens stay in
registers but for the last step.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.intra import finish
from pallas_kernels.kda.gpu.tiles import (
    INTERPRETED,
    SHIFT,
    UNSHIFT,
    borders,
    codes,
    dot,
    exp2,
    exp2_again,
    level_mask,
    log2_decay,
    place_of,
    tile_pointers,
    write_strength,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def widened(x):
    """bfloat16 as float32, anew wherever it is written, to spare registers."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r", [x], tl.float32, False, 2,
        )


@triton.jit
def places(C: tl.constexpr):
    """[R,8]: the token at each place of a tile."""
    R: tl.constexpr = C // 8
    return tl.arange(0, 8)[None, :] * R + tl.arange(0, R)[:, None]


@triton.jit
def load_spread(
    ptr, n, start, h, real, T, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):
    """One head of [B,T,H,K], [R,8,K]; 0 where not real."""
    ptr += ((n.to(tl.int64) * T + start) * H + h) * K
    at = ptr + (places(C)[:, :, None] * (H * K) + tl.arange(0, K)[None, None, :])
    return tl.load(at, mask=real[:, :, None], other=0.0)


@triton.jit
def store_spread(ptr, tile, x, C: tl.constexpr, K: tl.constexpr):
    """Writes [R,8,K] to tile number `tile` of an array of [C,K] tiles."""
    ptr += tile.to(tl.int64) * (C * K)
    at = ptr + (places(C)[:, :, None] * K + tl.arange(0, K)[None, None, :])
    tl.store(at, x.to(ptr.dtype.element_ty))


@triton.jit
def in_order(x, C: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr):
    """[R,8,K] as [C,K], for products."""
    return tl.reshape(tl.permute(x.to(DOT), (1, 0, 2)), [C, K])


@triton.jit
def row_in_order(x, C: tl.constexpr):
    """[R,8] as [C]."""
    return tl.reshape(tl.permute(x, (1, 0)), [C])


@triton.jit
def running_sums(x, K: tl.constexpr, R: tl.constexpr):
    """Sums over axis 0 of [R,8,K] up to each entry, and over all of it [8,K].

    Pairs of neighbours are added and summed up in turn: Triton's own scan goes through
    shared memory.
    """
    if R == 2:
        left, right = tl.split(tl.permute(x, (1, 2, 0)))
        total = left + right
        return tl.permute(tl.join(left, total), (2, 0, 1)), total
    else:
        pairs = tl.permute(tl.reshape(x, [R // 2, 2, 8, K]), (0, 2, 3, 1))
        left, right = tl.split(pairs)
        up_to, total = running_sums(left + right, K, R // 2)
        both = tl.permute(tl.join(up_to - right, up_to), (0, 3, 1, 2))
        return tl.reshape(both, [R, 8, K]), total


@triton.jit
def in_first(C: tl.constexpr, WIDE: tl.constexpr):
    """[8,1]: these tokens lie in the first block of WIDE."""
    return (tl.arange(0, 8) * (C // 8) < WIDE)[:, None]


@triton.jit
def exponents(decay, C: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):
    """Log2 decay since the start of the token's block of WIDE, [R,8,K], plus SHIFT.

    Also [8,K] over the token's block, and [K] over the first block and over the rest.
    """
    BLOCKS: tl.constexpr = C // WIDE
    run, total = running_sums(decay, K, C // 8)
    total = tl.reshape(total, [BLOCKS, 8 // BLOCKS, K])
    before = tl.reshape(tl.cumsum(total, axis=1) - total, [8, K])
    sums = tl.sum(total, axis=1)
    if BLOCKS == 2:
        first, rest = tl.split(tl.permute(sums, (1, 0)))
    else:
        first = tl.reshape(sums, [K])
        rest = tl.zeros([K], tl.float32)
    block = tl.where(in_first(C, WIDE), first[None, :], rest[None, :])
    return run + (before + SHIFT)[None, :, :], block, first, rest


@triton.jit
def join_blocks(row, columns, C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr):
    """[C,C]: blocks on the diagonal, and those left of them."""
    both = dot(row, columns.T, DOT)
    x, across = tl.split(tl.permute(tl.reshape(both, [C, 2, C]), (0, 2, 1)))
    return tl.where(level_mask(WIDE, C), across * UNSHIFT, x)


@triton.jit
def inverse_norm(x, NORM: tl.constexpr):
    if NORM:
        return tl.rsqrt(tl.sum(x * x, axis=2) + 1e-6)
    else:
        return tl.full(x.shape[:2], 1.0, tl.float32)


@triton.jit
def write_norms(q, k, norms_out, tile, scale, C: tl.constexpr, NORM: tl.constexpr):
    """Factors of q and of k, and q . k with both, [R,8] each."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    own = tl.sum(q * k, axis=2)
    q_inverse, k_inverse = inverse_norm(q, NORM), inverse_norm(k, NORM)
    row = norms_out + tile.to(tl.int64) * (2 * C) + places(C)
    tl.store(row, q_inverse)
    tl.store(row + C, k_inverse)
    q_factor = scale * q_inverse
    return q_factor, k_inverse, own * (q_factor * k_inverse)


@triton.jit
def write_tiles(
    q, k, since, block, first, rest, q_factor, k_inverse, b, kq_out, kr_out, tile,
    K: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """Kb, Qp and Kr; returns M and P below the diagonal. All as if of one run."""
    is_first = in_first(C, WIDE)
    ahead = UNSHIFT * tl.where(is_first, 1.0, exp2(first)[None, :])
    after = tl.where(is_first, exp2(rest)[None, :], 1.0)
    k_rows = widened(k) * k_inverse[:, :, None]
    column = k_rows * exp2_again(-since)
    near = column.to(DOT)
    column *= exp2(block + SHIFT)[None, :, :]
    columns = tl.permute(tl.join(near, column.to(DOT)), (3, 1, 0, 2))
    columns = tl.reshape(columns, [2 * C, K])
    column *= after[None, :, :]
    store_spread(kr_out, tile, column, C, K)
    factor = exp2_again(since)
    left = k_rows * factor
    kb = left * b[:, :, None] * ahead[None, :, :]
    store_spread(kq_out, 2 * tile, kb, C, K)
    m = join_blocks(in_order(left, C, K, DOT), columns, C, WIDE, DOT)
    left = widened(q) * q_factor[:, :, None] * factor
    p = join_blocks(in_order(left, C, K, DOT), columns, C, WIDE, DOT)
    left *= ahead[None, :, :]
    store_spread(kq_out, 2 * tile + 1, left, C, K)
    return m, p


@triton.jit
def keep_to_runs(
    ids, n, start, enter, leave, kq_out, kr_out, tile, T,
    K: tl.constexpr, C: tl.constexpr,
):
    """Zeros rows of Kb and Qp that the state entering does not reach, and of Kr."""
    tl.debug_barrier()  # other threads may have written these rows
    run = codes(ids, n, start + tl.arange(0, C), T)[:, None] // 2
    nothing = tl.zeros([C, K], kq_out.dtype.element_ty)
    tl.store(tile_pointers(kr_out, tile, C, K), nothing, mask=run != leave)
    tl.store(tile_pointers(kq_out, 2 * tile, C, K), nothing, mask=run != enter)
    tl.store(tile_pointers(kq_out, 2 * tile + 1, C, K), nothing, mask=run != enter)


@triton.jit
def bounded_intra_kernel(
    q, k, g, beta, A_log, dt_bias, ids,
    a_out, p_out, kq_out, kr_out, gam_out, b_out, norms_out, sums_out,
    T, scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes what `intra_kernel` does, and sums of log2 decays over the two blocks."""
    DOT: tl.constexpr = kq_out.dtype.element_ty
    tile = tl.program_id(0)
    h, n, start = place_of(tile, T, HV, C)
    key = h // (HV // H)
    at, channels = start + places(C), tl.arange(0, K)
    real, enter, leave = at < T, 0, 0
    if PACKED:
        real = real & (codes(ids, n, at, T) % 2 == 1)
        enter, leave = borders(ids, n, start, T, C)
    # All loads before anything waits for one.
    g_tile = load_spread(g, n, start, h, real, T, HV, K, C)
    slope = tl.load(A_log + h).to(tl.float32)
    bias = tl.load(dt_bias + h * K + channels).to(tl.float32)
    of_head = (n.to(tl.int64) * T + at) * HV + h
    raw_b = tl.load(beta + of_head, mask=real, other=0.0).to(tl.float32)
    k_tile = load_spread(k, n, start, key, real, T, H, K, C)
    q_tile = load_spread(q, n, start, key, real, T, H, K, C)

    b = write_strength(raw_b, real, SIGMOID, DOUBLE)
    tl.store(b_out + tile.to(tl.int64) * C + places(C), b)
    decay = log2_decay(
        g_tile.to(tl.float32), tl.exp(slope), bias[None, None, :], bound,
        real[:, :, None], GATE,
    )
    since, block, first, rest = exponents(decay, C, K, WIDE)
    vector = sums_out + tile.to(tl.int64) * (2 * K) + channels
    tl.store(vector, first)
    tl.store(vector + K, rest)
    gam = tl.where(enter == leave, exp2(first + rest), 0.0)
    tl.store(gam_out + tile.to(tl.int64) * K + channels, gam)
    q_factor, k_inverse, own = write_norms(
        q_tile, k_tile, norms_out, tile, scale, C, NORM
    )
    m, p = write_tiles(
        q_tile, k_tile, since, block, first, rest, q_factor, k_inverse, b, kq_out,
        kr_out, tile, K, C, WIDE, DOT,
    )
    # Most chunks lie in one run, and only those that do not pay for masks.
    if enter != leave:
        run = codes(ids, n, start + tl.arange(0, C), T) // 2
        same = run[:, None] == run[None, :]
        m, p = tl.where(same, m, 0.0), tl.where(same, p, 0.0)
    finish(m, p, row_in_order(own, C), row_in_order(b, C), a_out, p_out, tile, C, DOT)
    if enter != leave:
        keep_to_runs(ids, n, start, enter, leave, kq_out, kr_out, tile, T, K, C)
