"""One token for decoding: gate, norms, write strength, state and output in one pass."""

import triton
import triton.language as tl

from pallas_kernels.kda.gpu.tiles import LOG2E, exp2, sigmoid, softplus

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off


@triton.jit
def step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state,
    o,
    scale, bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """S' = e^g S + k b (v - k^T e^g S)^T; o = scale S'^T q, for BV columns of S.

    S' takes the place of S.
    """
    pid = tl.program_id(0)
    column = pid % (V // BV) * BV
    row = (pid // (V // BV)).to(tl.int64)  # batch row and value head
    h = row % HV
    key_row = row // HV * H + h // (HV // H)
    at_k, at_v = tl.arange(0, K), column + tl.arange(0, BV)
    inside = row * (K * V) + at_k[:, None] * V + at_v[None, :]
    s = tl.load(state + inside)
    q_k = tl.load(q + key_row * K + at_k).to(tl.float32)
    k_k = tl.load(k + key_row * K + at_k).to(tl.float32)
    v_v = tl.load(v + row * V + at_v).to(tl.float32)
    g_k = tl.load(g + row * K + at_k).to(tl.float32)
    b = tl.load(beta + row).to(tl.float32)
    if NORM:
        q_k *= tl.rsqrt(tl.sum(q_k * q_k, axis=0) + 1e-6)
        k_k *= tl.rsqrt(tl.sum(k_k * k_k, axis=0) + 1e-6)
    if GATE != "none":
        slope = tl.exp(tl.load(A_log + h).to(tl.float32))
        g_k += tl.load(dt_bias + h * K + at_k).to(tl.float32)
        if GATE == "bounded":
            g_k = bound * sigmoid(slope * g_k)
        else:
            g_k = -slope * softplus(g_k)
    if SIGMOID:
        b = sigmoid(b)
    if DOUBLE:
        b *= 2.0
    s *= exp2(g_k * LOG2E)[:, None]
    delta = b * (v_v - tl.sum(k_k[:, None] * s, axis=0))
    s += k_k[:, None] * delta[None, :]
    tl.store(state + inside, s)
    out = scale * tl.sum(q_k[:, None] * s, axis=0)
    tl.store(o + row * V + at_v, out.to(o.dtype.element_ty))
