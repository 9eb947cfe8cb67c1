"""The only serial part: the state runs over the chunks, forward and backward.

One program carries BV columns of the state, transposed: S^T [BV,K] in registers. Every
product then has the carried value on its left, which needs no shared memory. Tiles come
by tensor-memory descriptors made in the kernel; they clip rows past the end.

Long rows can be cut into segments that run side by side. A first pass (SUMMARY) finds
what each segment does to any state, S -> Phi S + Psi, by running it on the columns
[0 | I] of a state that is K columns wider.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import dot, real_rows

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def place(
    T, NSEG,
    HV: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):
    """This program's column block, head, batch row, segment, and range of chunks."""
    pid = tl.program_id(0)
    column = pid % (W // BV) * BV
    h = pid // (W // BV) % HV
    segment = pid // (W // BV * HV) % NSEG
    n = pid // (W // BV * HV * NSEG)
    chunks = tl.cdiv(T, C)
    each = tl.cdiv(chunks, NSEG)
    first = tl.minimum(segment * each, chunks)
    return column, h, n, segment, first, tl.minimum(first + each, chunks)


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
    target, x, row,
    R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):
    """Writes [R,D] in pieces [R,HALF], which share one buffer with other stores."""
    if D == HALF:
        target.store([row, 0], x)
    else:
        pieces = tl.permute(tl.reshape(x, [R, 2, D // 2]), (0, 2, 1))
        left, right = tl.split(pieces)
        target.store([row, 0], left)
        target.store([row, D // 2], right)


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
    ptr, offsets, column,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SUMMARY: tl.constexpr,
):
    """State before the first chunk; for a summary, [0 | I]."""
    if SUMMARY:
        v = column - V + tl.arange(0, BV)[:, None]
        return tl.where(v == tl.arange(0, K)[None, :], 1.0, 0.0)
    else:
        return tl.load(ptr + offsets)


@triton.jit
def scan_kernel(
    v, a, p, qp, kb, kr, gam, b, ids, s0,
    o, s_out, x_out, s_last,
    T, B, NSEG,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr, SUMMARY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S' = gam S + Kr^T X with X = A (b V - Kb S); O = Qp S + P X."""
    DOT: tl.constexpr = qp.dtype.element_ty
    W: tl.constexpr = V + K if SUMMARY else V
    column, h, n, segment, first, last = place(T, NSEG, HV, W, BV, C)
    chunks = tl.cdiv(T, C)
    count = B * chunks * HV
    v_in, o_out = tokens(v, n, T, HV, V, C, BV), tokens(o, n, T, HV, V, C, BV)
    a_in, p_in = tiles(a, count, C, C, C, C), tiles(p, count, C, C, C, C)
    qp_in, kb_in = tiles(qp, count, C, K, C, K), tiles(kb, count, C, K, C, K)
    kr_in = tiles(kr, count, C, K, C, K)
    HALF: tl.constexpr = K // 2 if K == 128 else K
    states, xs = tiles(s_out, count, V, K, BV, HALF), tiles(x_out, count, C, V, C, BV)
    where = state_offsets(n, segment, h, column, NSEG, HV, K, W, BV)
    s = first_state(s0, where, column, K, V, BV, SUMMARY)
    for t in tl.range(first, last, num_stages=STAGES):
        tile = (n * chunks + t) * HV + h
        s_dot = s.to(DOT)
        if SAVE:
            store_tile(states, s_dot, tile * V + column, BV, K, HALF)
        x = dot(s_dot, kb_in.load([tile * C, 0]).T, DOT)
        strength = tl.load(b + tile.to(tl.int64) * C + tl.arange(0, C))
        value = v_in.load([t * C, h * V + column % V]).to(tl.float32)
        if PACKED:
            value = tl.where(real_rows(ids, n, t * C, T, C, True)[:, None], value, 0.0)
        value = value.T * strength[None, :]
        if SUMMARY:
            value = tl.where(column < V, value, 0.0)
        x = dot(value - x, a_in.load([tile * C, 0]).T, DOT).to(DOT)
        if SAVE:
            xs.store([tile * C, column], x.T)
        if not SUMMARY:
            out = dot(s_dot, qp_in.load([tile * C, 0]).T, DOT)
            out += dot(x, p_in.load([tile * C, 0]).T, DOT)
            o_out.store([t * C, h * V + column], out.T.to(o.dtype.element_ty))
        decay = tl.load(gam + tile.to(tl.int64) * K + tl.arange(0, K))
        s = s * decay[None, :] + dot(x, kr_in.load([tile * C, 0]), DOT)
    tl.store(s_last + where, s)


@triton.jit
def reverse_kernel(
    do, a, p, qp, kb, kr, gam, ids, ds_last,
    dr, ds_out, ds0,
    T, B, NSEG,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, SUMMARY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dR = A^T (P^T dO + Kr dS'); dS = gam dS' + Qp^T dO - Kb^T dR. Writes dS', dR."""
    DOT: tl.constexpr = qp.dtype.element_ty
    W: tl.constexpr = V + K if SUMMARY else V
    column, h, n, segment, first, last = place(T, NSEG, HV, W, BV, C)
    chunks = tl.cdiv(T, C)
    count = B * chunks * HV
    do_in, dr_out = tokens(do, n, T, HV, V, C, BV), tiles(dr, count, C, V, C, BV)
    a_in, p_in = tiles(a, count, C, C, C, C), tiles(p, count, C, C, C, C)
    qp_in, kb_in = tiles(qp, count, C, K, C, K), tiles(kb, count, C, K, C, K)
    kr_in = tiles(kr, count, C, K, C, K)
    HALF: tl.constexpr = K // 2 if K == 128 else K
    states = tiles(ds_out, count, V, K, BV, HALF)
    where = state_offsets(n, segment, h, column, NSEG, HV, K, W, BV)
    ds = first_state(ds_last, where, column, K, V, BV, SUMMARY)
    for step in tl.range(0, last - first, num_stages=STAGES):
        t = last - 1 - step
        tile = (n * chunks + t) * HV + h
        ds_dot = ds.to(DOT)
        if not SUMMARY:
            store_tile(states, ds_dot, tile * V + column, BV, K, HALF)
        upper = do_in.load([t * C, h * V + column % V]).to(tl.float32)
        if PACKED:
            upper = tl.where(real_rows(ids, n, t * C, T, C, True)[:, None], upper, 0.0)
        if SUMMARY:
            upper = tl.where(column < V, upper, 0.0)
        upper = upper.to(DOT).T
        dx = dot(ds_dot, kr_in.load([tile * C, 0]).T, DOT)
        dx += dot(upper, p_in.load([tile * C, 0]), DOT)
        r = dot(dx, a_in.load([tile * C, 0]), DOT).to(DOT)
        if not SUMMARY:
            dr_out.store([tile * C, column], r.T)
        decay = tl.load(gam + tile.to(tl.int64) * K + tl.arange(0, K))
        ds = ds * decay[None, :] + dot(upper, qp_in.load([tile * C, 0]), DOT)
        ds -= dot(r, kb_in.load([tile * C, 0]), DOT)
    tl.store(ds0 + where, ds)
