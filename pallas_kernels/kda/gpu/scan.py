"""The only serial part: the state runs over the chunks, forward and backward.

One program carries BV columns of the state, transposed: S^T [BV,K] in registers. Every
product then has the carried value on its left, which needs no shared memory. Tiles come
by tensor-memory descriptors made in the kernel; they clip rows past the end.

Long rows can be cut into segments that run side by side, once the state at each border
is known. A pass without outputs finds it: it runs ahead from the first state, or
(SUMMARY) finds what each segment does to any state, S -> Phi S + Psi, by running it on
the columns [0 | I] of a state that is K columns wider.

Or time is cut into pieces that run one after another, in several launches. Where there
are half as many programs again as processors, this spares half of the second round.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import dot, real_rows

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def place(
    T, B, NSEG, PIECES, first_pair,
    HV: tl.constexpr, W: tl.constexpr, BV: tl.constexpr,
):
    """This program's column block, head, batch row, segment, and piece of time."""
    pair = tl.program_id(0) + first_pair
    column = pair % (W // BV) * BV
    h = pair // (W // BV) % HV
    rest = pair // (W // BV * HV)
    return column, h, rest % B, rest // B % NSEG, rest // (B * NSEG)


@triton.jit
def chunk_range(part, parts, T, C: tl.constexpr):
    """First chunk of a part of time, and the one after its last."""
    chunks = tl.cdiv(T, C)
    each = tl.cdiv(chunks, parts)
    first = tl.minimum(part * each, chunks)
    return first, tl.minimum(first + each, chunks)


@triton.jit
def tokens(
    ptr, n, T,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):
    """Descriptor of one batch row of [B,T,HV,V] in tiles [C,BV]."""
    return tl.make_tensor_descriptor(
        ptr + n.to(tl.int64) * T * (HV * V), [T, HV * V], [HV * V, 1], [C, BV]
    )


@triton.jit
def tiles(
    ptr, count,
    R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):
    """Descriptor of `count` tiles [R,D] in blocks [BR,BD]."""
    return tl.make_tensor_descriptor(ptr, [count * R, D], [D, 1], [BR, BD])


@triton.jit
def store_tile(
    target, x, row, column,
    D: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):
    """Writes [R,W] into an array whose rows have D columns.

    Through pointers: a tensor-memory store would wait for the one before it.
    """
    at = target + row.to(tl.int64) * D + column
    at += tl.arange(0, R)[:, None] * D + tl.arange(0, W)[None, :]
    tl.store(at, x)


@triton.jit
def state_offsets(
    n, segment, h, column, NSEG,
    HV: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BV: tl.constexpr,
):
    """Offsets [BV,K] into states [B,NSEG,HV,K,W]."""
    at = (n.to(tl.int64) * NSEG + segment) * HV + h
    v = column + tl.arange(0, BV)[:, None]
    return at * (K * W) + tl.arange(0, K)[None, :] * W + v


@triton.jit
def first_state(
    ptr, carried, piece, offsets, column,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SUMMARY: tl.constexpr,
):
    """State before the first chunk: given, or left by the piece before.

    For a summary, [0 | I].
    """
    if SUMMARY:
        v = column - V + tl.arange(0, BV)[:, None]
        return tl.where(v == tl.arange(0, K)[None, :], 1.0, 0.0)
    else:
        given = tl.load(ptr + offsets, mask=piece == 0, other=0.0)
        return given + tl.load(carried + offsets, mask=piece > 0, other=0.0)


@triton.jit
def scan_kernel(
    v, a, p, kq, kr, gam, b, s0,
    o, s_out, x_out, s_last,
    T, B, NSEG, PIECES, first_pair,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr, SUMMARY: tl.constexpr,
    OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):
    """S' = gam S + Kr^T X with X = A (b V - Kb S); O = Qp S + P X.

    Memory holds A - I: only what it adds to X is a product of rounded values.
    """
    DOT: tl.constexpr = kr.dtype.element_ty
    W: tl.constexpr = V + K if SUMMARY else V
    column, h, n, segment, piece = place(T, B, NSEG, PIECES, first_pair, HV, W, BV)
    first, last = chunk_range(segment * PIECES + piece, NSEG * PIECES, T, C)
    chunks = tl.cdiv(T, C)
    count = B * chunks * HV
    v_in, o_out = tokens(v, n, T, HV, V, C, BV), tokens(o, n, T, HV, V, C, BV)
    a_in, p_in = tiles(a, count, C, C, C, C), tiles(p, count, C, C, C, C)
    kq_in = tiles(kq, 2 * count, C, K, C, K)
    kr_in = tiles(kr, count, C, K, C, K)
    where = state_offsets(n, segment, h, column, NSEG, HV, K, W, BV)
    s = first_state(s0, s_last, piece, where, column, K, V, BV, SUMMARY)
    for t in tl.range(first, last, num_stages=STAGES):
        tile = (n * chunks + t) * HV + h
        s_dot = s.to(DOT)
        if SAVE:
            store_tile(s_out, s_dot, tile * V + column, 0, K, BV, K)
        x = dot(s_dot, kq_in.load([2 * tile * C, 0]).T, DOT)
        strength = tl.load(b + tile.to(tl.int64) * C + tl.arange(0, C))
        value = v_in.load([t * C, h * V + column % V]).to(tl.float32)
        value = value.T * strength[None, :]
        if PACKED:  # whatever lies in padding, it is written with strength 0
            value = tl.where(strength[None, :] == 0.0, 0.0, value)
        if SUMMARY:
            value = tl.where(column < V, value, 0.0)
        x = value - x
        x = (x + dot(x, a_in.load([tile * C, 0]).T, DOT)).to(DOT)
        if SAVE:
            store_tile(x_out, x.T, tile * C, column, V, C, BV)
        if OUTPUTS:
            out = dot(s_dot, kq_in.load([(2 * tile + 1) * C, 0]).T, DOT)
            out += dot(x, p_in.load([tile * C, 0]).T, DOT)
            o_out.store([t * C, h * V + column], out.T.to(o.dtype.element_ty))
        decay = tl.load(gam + tile.to(tl.int64) * K + tl.arange(0, K))
        s = s * decay[None, :] + dot(x, kr_in.load([tile * C, 0]), DOT)
    tl.store(s_last + where, s)


@triton.jit
def reverse_kernel(
    do, a, p, kq, kr, gam, ids, ds_last,
    dr, ds_out, ds0,
    T, B, NSEG, PIECES, first_pair,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, SUMMARY: tl.constexpr,
    OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):
    """dR = A^T (P^T dO + Kr dS'); dS = gam dS' + Qp^T dO - Kb^T dR. Writes dS', dR."""
    DOT: tl.constexpr = kr.dtype.element_ty
    W: tl.constexpr = V + K if SUMMARY else V
    column, h, n, segment, piece = place(T, B, NSEG, PIECES, first_pair, HV, W, BV)
    part = segment * PIECES + PIECES - 1 - piece
    first, last = chunk_range(part, NSEG * PIECES, T, C)
    chunks = tl.cdiv(T, C)
    count = B * chunks * HV
    do_in = tokens(do, n, T, HV, V, C, BV)
    a_in, p_in = tiles(a, count, C, C, C, C), tiles(p, count, C, C, C, C)
    kq_in = tiles(kq, 2 * count, C, K, C, K)
    kr_in = tiles(kr, count, C, K, C, K)
    where = state_offsets(n, segment, h, column, NSEG, HV, K, W, BV)
    ds = first_state(ds_last, ds0, piece, where, column, K, V, BV, SUMMARY)
    for step in tl.range(0, last - first, num_stages=STAGES):
        t = last - 1 - step
        tile = (n * chunks + t) * HV + h
        ds_dot = ds.to(DOT)
        if OUTPUTS:
            store_tile(ds_out, ds_dot, tile * V + column, 0, K, BV, K)
        upper = do_in.load([t * C, h * V + column % V]).to(tl.float32)
        if PACKED:
            upper = tl.where(real_rows(ids, n, t * C, T, C, True)[:, None], upper, 0.0)
        if SUMMARY:
            upper = tl.where(column < V, upper, 0.0)
        upper = upper.to(DOT).T
        dx = dot(ds_dot, kr_in.load([tile * C, 0]).T, DOT)
        dx += dot(upper, p_in.load([tile * C, 0]), DOT)
        r = (dx + dot(dx, a_in.load([tile * C, 0]), DOT)).to(DOT)
        if OUTPUTS:
            store_tile(dr, r.T, tile * C, column, V, C, BV)
        decay = tl.load(gam + tile.to(tl.int64) * K + tl.arange(0, K))
        ds = ds * decay[None, :] + dot(upper, kq_in.load([(2 * tile + 1) * C, 0]), DOT)
        ds -= dot(r, kq_in.load([2 * tile * C, 0]), DOT)
    tl.store(ds0 + where, ds)
