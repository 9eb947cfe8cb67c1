"""Gradients by the raw inputs, one program a chunk, a head and W channels.

With dx for the gradient by x, and products over pairs carrying the decay in between:

    dL = -stril(dR X^T)    dP = tril(dO X^T)    dv = b dR
    dq   = e^G (dO S^T) + dP k
    rise = dL k - e^G (dR S^T)                  dk = b rise + fall
    fall = e^(G_C - G) (X dS'^T) + dP^T q + (b dL)^T k
    dG   = q . dq + k . (b rise - fall),  and the last row also feels the state's decay

q and k grow with exp(G) where they are rows and with exp(-G) where they are columns,
so the gradient by G needs no further product. dg is the sum of dG over later tokens.

Sums over all channels are known beforehand, from products over V (see `pairs.py`), so
that programs of W channels need nothing from each other. Gradients are kept in units
of `size`, a power of two: the factors of `tiles.py` fill the exponents of float32, and
tiny gradients would fall out below.
"""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import (
    UNSHIFT,
    dot,
    exp2,
    grid_ij,
    level_mask,
    levels,
    load_vector,
    log2_decay,
    outer_factors,
    pair_factor,
    place_of,
    real_rows,
    rounded,
    row_pointers,
    run_masks,
    sigmoid,
    softplus,
    store_rows,
    sum_rows,
    tile_pointers,
    to_block_end,
    wide_column,
    wide_row,
)

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def gate_backward(dg, z, slope, bound, GATE: tl.constexpr):
    """Gradient by the gate's logits, and its part of that by A_log, [C,K] each."""
    if GATE == "bounded":
        s = sigmoid(slope * z)
        dz = dg * (bound * slope) * (s - s * s)
        return dz, dz * z
    elif GATE == "softplus":
        return -dg * slope * sigmoid(z), -dg * slope * softplus(z)
    else:
        return dg, dg


@triton.jit
def norm_backward(dy, size, y, inverse, y_dy, NORM: tl.constexpr):
    """Gradient by x of y = x * inverse, from dy in units of size and rowsum(y . dy)."""
    if NORM:
        return dy * (size * inverse)[:, None] - y * (y_dy * inverse)[:, None]
    else:
        return dy * size


@triton.jit
def level_terms(
    q_rows, k_rows, decay, out, x, r, s, ds, p_pairs, l_pairs, b, enters, leaves, final,
    unit, C: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: dq, dk, dG, b rise, and what the last row of dG gets on top.

    dG takes the operands of the products as they were rounded. What a pair adds to its
    row then cancels what it takes from its column, as it must in the sum over tokens.
    """
    pre, post = outer_factors(decay, C, DOT)
    dq = tl.where(enters[:, None], pre * unit, 0.0) * dot(out, s, DOT)
    rise = tl.where(enters[:, None], pre * -unit, 0.0) * dot(r, s, DOT)
    fall = tl.where(leaves[:, None], post * unit, 0.0) * dot(x, ds, DOT)
    # What the last token writes does not decay in this chunk. Added and taken away, it
    # would drown the rest.
    from_state = tl.where(final[:, None], 0.0, k_rows * fall)
    dg = q_rows * dq + k_rows * (b[:, None] * rise) - from_state
    from_state = tl.sum(from_state, axis=0)
    for level in range(levels(C)):
        factor = pair_factor(decay, level, C, DOT)
        mask = level_mask(1 << level, C)
        left, right = (q_rows * factor).to(DOT), (k_rows * factor).to(DOT)
        scaled = (b[:, None] * k_rows * factor).to(DOT)
        p_level = tl.where(mask, p_pairs, 0.0).to(DOT)
        l_level = tl.where(mask, l_pairs, 0.0).to(DOT)
        pairs = dot(p_level, right, DOT)
        dq += factor * pairs
        dg += left.to(tl.float32) * pairs
        pairs = dot(l_level, right, DOT)
        rise += factor * pairs
        dg += scaled.to(tl.float32) * pairs
        pairs = dot(p_level.T, left, DOT) + dot(l_level.T, scaled, DOT)
        fall += factor * pairs
        dg -= right.to(tl.float32) * pairs
    return dq, b[:, None] * rise + fall, dg, rise, from_state


@triton.jit
def load_vectors(rows, norms, tile, C: tl.constexpr):
    """[C] each: diag(dP), q . dq, k . dk, and what normalises q and k."""
    own, q_dq = load_vector(rows, tile, 0, 3, C), load_vector(rows, tile, 1, 3, C)
    k_dk = load_vector(rows, tile, 2, 3, C)
    q_inverse = load_vector(norms, tile, 0, 2, C)
    return own, q_dq, k_dk, q_inverse, load_vector(norms, tile, 1, 2, C)


@triton.jit
def load_tiles(
    s, dp, dr, dl, x, ds, tile, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """What lies chunk by chunk: states, pairs, dR and X."""
    s_c = state_columns(s, tile, column, K, V, W)
    p_pairs = tl.load(tile_pointers(dp, tile, C, C))
    r = tl.load(tile_pointers(dr, tile, C, V))
    l_pairs = tl.load(tile_pointers(dl, tile, C, C))
    x_c = tl.load(tile_pointers(x, tile, C, V))
    return s_c, p_pairs, r, l_pairs, x_c, state_columns(ds, tile, column, K, V, W)


@triton.jit
def level_grads(
    q, k, decay, out, x, r, s, ds, p_pairs, l_pairs, dq_out, dk_out,
    n, start, h, column, real, b, enters, leaves, own, q_dq, k_dk, q_inverse,
    k_inverse, size, scale, T,
    HV: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
):
    """Any gate: does what `wide_grads` does; its dG misses nothing."""
    k_rows = k.to(tl.float32) * k_inverse[:, None]
    q_unit = q.to(tl.float32) * q_inverse[:, None]
    q_rows = scale * q_unit
    at = tl.where(leaves & real, tl.arange(0, C), -1)
    dq, dk, dg, rise, more = level_terms(
        q_rows, k_rows, decay, out, x, r, s, ds, p_pairs, l_pairs, b, enters, leaves,
        at == tl.max(at), 1.0 / size, C, DOT,
    )
    unit = 1.0 / size
    dq = scale * (dq + (unit * own)[:, None] * k_rows)
    dq = norm_backward(dq, size, q_unit, q_inverse, q_dq, NORM)
    store_rows(dq_out, dq, n, start, h, column, T, HV, K, C, W)
    dk += (unit * own)[:, None] * q_rows
    dk = norm_backward(dk, size, k_rows, k_inverse, k_dk, NORM)
    store_rows(dk_out, dk, n, start, h, column, T, HV, K, C, W)
    return dg, tl.zeros_like(dg), tl.sum(k_rows * rise, axis=1), more


@triton.jit
def halves(x, C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr):
    """The first block's rows, and the others, 0 elsewhere."""
    first = tl.arange(0, C)[:, None] < WIDE
    return tl.where(first, x, 0.0).to(DOT), tl.where(first, 0.0, x).to(DOT)


@triton.jit
def wide_rows(
    rows, state, pairs, near_1, near_2, far, ahead, enters, unit,
    C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """rows S^T e^G + pairs k, [C,W], but for the factor of its rows.

    near_1 and near_2 hold the first and the second block's columns, else 0; far holds
    the first block's, up to its end. What rows take from the wrong block is dropped.
    """
    first = tl.arange(0, C)[:, None] < WIDE
    x = dot(rows, state, DOT)
    # One select a vector: a select between two makes Triton move whole tiles.
    x *= tl.where(first, unit * UNSHIFT, (ahead * (unit * UNSHIFT))[None, :])
    x = tl.where(enters[:, None], x, 0.0)
    if C > WIDE:
        x += tl.where(first, 0.0, UNSHIFT) * dot(pairs, far, DOT)
        x = tl.dot(pairs, near_2, x)
    return x + tl.where(first, dot(pairs, near_1, DOT), 0.0)


@triton.jit
def wide_columns(
    x, state, p_pairs, l_pairs, q_1, q_2, k_1, k_2, behind, leaves, unit,
    C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """X dS'^T, that plus the pairs of two blocks, and the pairs inside blocks."""
    first = tl.arange(0, C)[:, None] < WIDE
    fall = dot(x, state, DOT) * tl.where(first, (behind * unit)[None, :], unit)
    fall = tl.where(leaves[:, None], fall, 0.0)
    both = fall
    inside = tl.dot(l_pairs.T, k_1, dot(p_pairs.T, q_1, DOT))
    if C > WIDE:
        second = tl.dot(l_pairs.T, k_2, dot(p_pairs.T, q_2, DOT))
        both += tl.where(first, UNSHIFT, 0.0) * second
        inside = tl.where(first, inside, second)
    return fall, both, inside


@triton.jit
def add_columns(
    dk, dg, missed, k_rows, since, first, rest, fall, both, inside,
    C: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):
    """`wide_grads` with what `wide_columns` returns; last what the last row of dG gets.

    What a column misses is the next token's.
    """
    factor = wide_column(since)
    exact = k_rows * factor
    right = rounded(exact)
    dg -= right * inside
    next_missed = (exact - right) * inside
    dk += factor * inside
    factor = to_block_end(factor, first, rest, C, WIDE)
    dk += factor * both
    exact = k_rows * factor
    right = rounded(exact)
    more = tl.sum(right * fall, axis=0)
    dg -= right * both
    next_missed += (exact - right) * both
    i, j = grid_ij(C)
    missed += dot(tl.where(i == j + 1, 1.0, 0.0), next_missed, DOT)
    return dk, dg, missed, more


@triton.jit
def raw_columns(
    ptr, n, start, h, column, real, T,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """`load_rows` as it lies in memory."""
    at = row_pointers(ptr, n, start, h, column, T, H, D, C, W)
    return tl.load(at, mask=real[:, None], other=0.0)


@triton.jit
def finish_gate(
    g, dg, missed, last, lower, same, leaves, real, slope, bias, bound, size,
    dg_out, dA_out, dbias_out, tile, n, start, h, column, T,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
):
    """From the gradient by G to those by g, A_log and dt_bias."""
    upper = lower.T
    if PACKED:
        upper = tl.where(same, upper, 0.0).to(DOT)
    dg = missed + sum_rows(upper, dg, DOT)
    dg = size * (dg + tl.where(leaves[:, None], last[None, :], 0.0))
    dg = tl.where(real[:, None], dg, 0.0)
    z = g.to(tl.float32) + bias[None, :]
    dz, dA = gate_backward(dg, z, slope, bound, GATE)
    store_rows(dg_out, dz, n, start, h, column, T, HV, K, C, W)
    vector = tile.to(tl.int64) * K + column + tl.arange(0, W)
    tl.store(dA_out + vector, tl.sum(dA, axis=0))
    tl.store(dbias_out + vector, tl.sum(dz, axis=0))


@triton.jit
def state_columns(states, tile, column, K: tl.constexpr, V: tl.constexpr,
                  W: tl.constexpr):
    """W columns of a transposed state [V,K]."""
    states += tile.to(tl.int64) * (V * K) + column
    return tl.load(states + (tl.arange(0, V)[:, None] * K + tl.arange(0, W)[None, :]))


@triton.jit
def wide_grads(
    q, k, decay, out, x, r, s, ds, p_pairs, l_pairs, lower, first, rest, dq_out, dk_out,
    n, start, h, column, b, enters, leaves, own, q_dq, k_dk, q_inverse,
    k_inverse, size, scale, T,
    HV: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
    RISE: tl.constexpr, DOT: tl.constexpr,
):
    """Bounded gate: writes dq, dk.

    Returns dG, what its sum over later tokens misses, rise . k, and what its last row
    gets. dG takes rounded factors, so that rows and columns cancel in that sum. What a
    rounding takes away still belongs to one token for certain, the row itself or the
    one after the column, as all its pairs reach over it. Without it the gradient of
    A_log, one number a head, is off by up to 8e-3.
    """
    i, _ = grid_ij(C)
    since = sum_rows(lower, decay, DOT) - tl.where(i < WIDE, 0.0, first[None, :])
    k_rows = k.to(tl.float32) * k_inverse[:, None]
    factor = wide_column(since)
    near_1, near_2 = halves(k_rows * factor, C, WIDE, DOT)
    far, _ = halves(k_rows * to_block_end(factor, first, rest, C, WIDE), C, WIDE, DOT)
    unit = 1.0 / size
    pairs = wide_rows(
        out, s, p_pairs, near_1, near_2, far, exp2(first), enters, unit, C, WIDE, DOT
    )
    q_unit = q.to(tl.float32) * q_inverse[:, None]
    factor = scale * wide_row(since)
    exact = q_unit * factor
    left = rounded(exact)
    q_1, q_2 = halves(left, C, WIDE, DOT)
    dg = left * pairs
    missed = (exact - left) * pairs
    dq = factor * pairs + (scale * unit * own)[:, None] * k_rows
    dq = norm_backward(dq, size, q_unit, q_inverse, q_dq, NORM)
    store_rows(dq_out, dq, n, start, h, column, T, HV, K, C, W)
    dk = q_unit * (scale * unit * own)[:, None]
    pairs = wide_rows(
        r, s, l_pairs, near_1, near_2, far, exp2(first), enters, -unit, C, WIDE, DOT
    )
    factor = b[:, None] * wide_row(since)
    exact = k_rows * factor
    left = rounded(exact)
    k_1, k_2 = halves(left, C, WIDE, DOT)
    dg += left * pairs
    missed += (exact - left) * pairs
    k_rise = tl.zeros([C], tl.float32)
    if RISE:
        k_rise += tl.sum(k_rows * wide_row(since) * pairs, axis=1)
    dk += factor * pairs
    fall, both, inside = wide_columns(
        x, ds, p_pairs, l_pairs, q_1, q_2, k_1, k_2, exp2(rest), leaves, unit, C, WIDE,
        DOT,
    )
    dk, dg, missed, more = add_columns(
        dk, dg, missed, k_rows, since, first, rest, fall, both, inside, C, WIDE, DOT
    )
    dk = norm_backward(dk, size, k_rows, k_inverse, k_dk, NORM)
    store_rows(dk_out, dk, n, start, h, column, T, HV, K, C, W)
    return dg, missed, k_rise, more


@triton.jit
def grads_kernel(
    q, k, g, A_log, dt_bias, ids, do, x, s, ds, dr, dp, dl, b, rows, sizes, norms,
    sums, gam, ones,
    dq_out, dk_out, dg_out, dA_out, dbias_out, rise_out,
    T, scale, bound, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, PACKED: tl.constexpr,
):
    """Writes dq, dk, dg, and sums over the chunk for A_log and dt_bias.

    And over W channels of k . rise, for a write strength that is no sigmoid.
    """
    DOT: tl.constexpr = s.dtype.element_ty
    part, tile = tl.program_id(0) % (K // W), tl.program_id(0) // (K // W)
    column = part * W
    h, n, start = place_of(tile, T, HV, C)
    real = real_rows(ids, n, start, T, C, PACKED)
    same, enters, leaves, _ = run_masks(ids, n, start, T, C, PACKED)
    # All loads before anything waits for one, while registers are free.
    size, b_c = tl.load(sizes + tile), load_vector(b, tile, 0, 1, C)
    own, q_dq, k_dk, q_inverse, k_inverse = load_vectors(rows, norms, tile, C)
    key, channels = h // (HV // H), column + tl.arange(0, W)
    g_raw = raw_columns(g, n, start, h, column, real, T, HV, K, C, W)
    slope = tl.load(A_log + h)
    bias = tl.load(dt_bias + h * K + channels).to(tl.float32)
    gam_c = tl.load(gam + tile.to(tl.int64) * K + channels)
    if WIDE > 0:
        vector = sums + tile.to(tl.int64) * (2 * K) + channels
        first, rest = tl.load(vector), tl.load(vector + K)
    lower = tl.load(tile_pointers(ones, 0, C, C))
    k_raw = raw_columns(k, n, start, key, column, real, T, H, K, C, W)
    q_raw = raw_columns(q, n, start, key, column, real, T, H, K, C, W)
    out = raw_columns(do, n, start, h, 0, real, T, HV, V, C, V).to(DOT)
    chunk = load_tiles(s, dp, dr, dl, x, ds, tile, column, K, V, C, W)
    s_c, p_pairs, r, l_pairs, x_c, ds_c = chunk
    slope, z = tl.exp(slope.to(tl.float32)), g_raw.to(tl.float32)
    decay = log2_decay(z, slope, bias[None, :], bound, real[:, None], GATE)
    last = gam_c * tl.sum(s_c.to(tl.float32) * ds_c.to(tl.float32), axis=0) / size
    if WIDE > 0:
        dg, missed, k_rise, more = wide_grads(
            q_raw, k_raw, decay, out, x_c, r, s_c, ds_c, p_pairs, l_pairs, lower, first,
            rest, dq_out, dk_out, n, start, h, column, b_c, enters, leaves, own, q_dq,
            k_dk, q_inverse, k_inverse, size, scale, T, HV, K, C, W, WIDE, NORM,
            not SIGMOID, DOT,
        )
    else:
        dg, missed, k_rise, more = level_grads(
            q_raw, k_raw, decay, out, x_c, r, s_c, ds_c, p_pairs, l_pairs, dq_out,
            dk_out, n, start, h, column, real, b_c, enters, leaves, own, q_dq, k_dk,
            q_inverse, k_inverse, size, scale, T, HV, K, C, W, NORM, DOT,
        )
    if not SIGMOID:
        rise_out += (part.to(tl.int64) * N + tile) * C
        tl.store(rise_out + tl.arange(0, C), size * k_rise)
    finish_gate(
        g_raw, dg, missed, last + more, lower, same, leaves, real, slope, bias, bound,
        size, dg_out, dA_out, dbias_out, tile, n, start, h, column, T, HV, K, C, W,
        GATE, PACKED, DOT,
    )
