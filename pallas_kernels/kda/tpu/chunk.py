"""The algebra of one chunk: values in, values out, for N stacks of heads at once.

Names are those of `xla.py`: Kp = k e^G, Qp = q e^G, Kr = k e^(G_C - G), and

    X = A (beta V - beta Kp S)      O = Qp S + P X      S' = gam S + Kr^T X

States are transposed, S^T [N,V,K], one array for each head of the stacks: their decay
is then a row. With dx for the gradient by x, S' for the next state, dP and dL below the
diagonal alone, and products over pairs that carry the decay in between:

    dX = P^T dO + Kr dS'     dR = A^T dX     dP = dO X^T     dL = -dR X^T
    dS = gam dS' + Qp^T dO - beta Kp^T dR    dv = beta dR
    dq = e^G (dO S^T) + dP k                 rise = dL k - e^G (dR S^T)
    fall = e^(G_C - G) (X dS'^T) + dP^T q + (beta dL)^T k
    dk = beta rise + fall                    dbeta = rowsum(dR . V) + rowsum(k . rise)
    dG = q . dq + k . (beta rise - fall), and the last row also feels the state's decay
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.tpu.stacks import (
    LOG2E,
    Factors,
    Masks,
    Spec,
    add_up,
    by_head,
    dot,
    make_factors,
    select,
    unit_lower_inverse,
)

Array = jax.Array


class Rows(NamedTuple):
    """Tokens of all stacks, or gradients by them.

    q (normalised, scaled), k, g (natural log of the decay) [N,R,K]; v [N,R,V];
    b [N,R,1].
    """

    q: Array
    k: Array
    g: Array
    v: Array
    b: Array


class Outer(NamedTuple):
    """What meets the state: kb = beta Kp, qp, kr [N,R,K]; gam, one [N,1,K] a head."""

    kb: Array
    qp: Array
    kr: Array
    gam: list[Array]


class Local(NamedTuple):
    """What a chunk needs before its state is known; m, p [N,R,R]."""

    factors: Factors
    outer: Outer
    m: Array
    p: Array


def local(spec: Spec, masks: Masks, rows: Rows) -> Local:
    factors = make_factors(spec, masks, LOG2E * rows.g)
    return Local(
        factors,
        _outer(spec, masks, rows, factors),
        *_pairs(spec, masks, rows, factors),
    )


class Serial(NamedTuple):
    """What meets the states; lower = beta M; written = beta V [N,R,V]."""

    outer: Outer
    lower: Array
    p: Array
    written: Array


def serial(rows: Rows, part: Local) -> Serial:
    return Serial(part.outer, rows.b * part.m, part.p, rows.b * rows.v)


def forward(
    spec: Spec, masks: Masks, parts: Serial, states: list[Array]
) -> tuple[Array, list[Array], Array]:
    """Returns O [N,R,V], the states after the chunk, and A [N,R,R]."""
    outer, lower, p, written = parts
    recalled = _times_states(spec, outer.kb, states, "nt")
    read = _times_states(spec, outer.qp, states, "nt")
    a = unit_lower_inverse(spec, masks, lower)
    x = dot(spec, a, written - recalled)
    o = read + dot(spec, p, x)
    heads = zip(
        states, outer.gam, by_head(spec, x), by_head(spec, outer.kr), strict=True
    )
    return o, [gam * s + dot(spec, x, kr, "tn") for s, gam, x, kr in heads], a


class Backward(NamedTuple):
    """X, dO and dR [N,R,V], and the states before and their gradients after a chunk."""

    x: Array
    do: Array
    dr: Array
    states: list[Array]
    dstates: list[Array]


def backward_states(
    spec: Spec,
    parts: Serial,
    a: Array,
    do: Array,
    states: list[Array],
    dstates: list[Array],
) -> tuple[Backward, list[Array]]:
    """The serial part; also returns gradients by the states before the chunk."""
    outer = parts.outer
    recalled = _times_states(spec, outer.kb, states, "nt")
    x = dot(spec, a, parts.written - recalled)
    dx = dot(spec, parts.p, do, "tn") + _times_states(spec, outer.kr, dstates, "nt")
    dr = dot(spec, a, dx, "tn")
    heads = zip(
        dstates,
        outer.gam,
        *(by_head(spec, y) for y in (do, dr, outer.qp, outer.kb)),
        strict=True,
    )
    before = [
        gam * ds + dot(spec, do, qp, "tn") - dot(spec, dr, kb, "tn")
        for ds, gam, do, dr, qp, kb in heads
    ]
    return Backward(x, do, dr, states, dstates), before


def _outer(spec: Spec, masks: Masks, rows: Rows, factors: Factors) -> Outer:
    pre = select(masks.enters, factors.pre)
    last = (x[:, spec.C - 1 :] for x in by_head(spec, factors.pre))
    return Outer(
        rows.b * rows.k * pre,
        rows.q * pre,
        select(masks.leaves, rows.k * factors.post),
        [select(masks.passes, x) for x in last],
    )


def _pairs(
    spec: Spec, masks: Masks, rows: Rows, factors: Factors
) -> tuple[Array, Array]:
    """M and P [N,R,R], within documents."""
    own = jnp.sum(rows.q * rows.k, axis=-1, keepdims=True)
    m = jnp.zeros((), jnp.float32)
    p = jnp.where(masks.i == masks.j, own, 0.0)
    both = jnp.concatenate([rows.k, rows.q], axis=1)
    for mask, row, col in factors.pairs:
        left = both * jnp.concatenate([row, row], axis=1)
        product = dot(spec, left, rows.k * col, "nt")
        m = jnp.where(mask, product[:, : spec.R], m)
        p = jnp.where(mask, product[:, spec.R :], p)
    if spec.packed:
        m, p = (jnp.where(masks.same, y, 0.0) for y in (m, p))
    return m, p


def _times_states(
    spec: Spec, x: Array, states: list[Array], contract: str = "nn"
) -> Array:
    """Each head's rows times its state."""
    heads = zip(by_head(spec, x), states, strict=True)
    found = [dot(spec, rows, state, contract) for rows, state in heads]
    return jnp.concatenate(found, axis=1)


def backward_rows(
    spec: Spec, masks: Masks, rows: Rows, part: Local, known: Backward
) -> Rows:
    """Gradients by the rows, see the top.

    dG takes the operands of products as they were rounded. What a pair adds to its row
    then cancels what it takes from its column, as it must in the sum over tokens.
    """
    (q, k, _, v, b), factors = rows, part.factors
    x, do, dr, states, dstates = known
    pre, post = select(masks.enters, factors.pre), select(masks.leaves, factors.post)
    dq = pre * _times_states(spec, do, states)
    rise = -pre * _times_states(spec, dr, states)
    fall = post * _times_states(spec, x, dstates)
    dG = q * dq + k * (b * rise - fall)
    decayed = zip(part.outer.gam, states, dstates, strict=True)
    last = [
        jnp.sum(fallen, axis=1, keepdims=True)
        + gam * jnp.sum(state * dstate, axis=1, keepdims=True)
        for fallen, (gam, state, dstate) in zip(
            by_head(spec, k * fall), decayed, strict=True
        )
    ]
    outputs = dot(spec, jnp.concatenate([do, -dr], axis=1), x, "nt")
    for mask, row, col in factors.pairs:
        mask = mask & masks.same if spec.packed else mask
        halves = outputs[:, : spec.R], outputs[:, spec.R :]
        dpl = jnp.concatenate([jnp.where(mask, y, 0.0) for y in halves], axis=1)
        left, right = jnp.concatenate([q * row, b * k * row], axis=1), k * col
        up, down = dot(spec, dpl, right), dot(spec, dpl, left, "tn")
        dq += row * up[:, : spec.R]
        rise += row * up[:, spec.R :]
        fall += col * down
        moved = _rounded(spec, left) * up
        dG += moved[:, : spec.R] + moved[:, spec.R :] - _rounded(spec, right) * down
    own = jnp.sum(do * x, axis=-1, keepdims=True)  # the diagonal of P holds no decay
    db = jnp.sum(dr * v, axis=-1, keepdims=True)
    db += jnp.sum(k * rise, axis=-1, keepdims=True)
    dk = b * rise + fall + own * q
    dg = add_up(spec, masks.same & (masks.j >= masks.i), _add_last(spec, dG, last))
    return Rows(dq + own * k, dk, dg, b * dr, db)


def _add_last(spec: Spec, dG: Array, last: list[Array]) -> Array:
    """Adds [N,1,K] to the last row of each head."""
    at = jax.lax.broadcasted_iota(jnp.int32, (spec.C, 1), 0)
    heads = zip(by_head(spec, dG), last, strict=True)
    found = [x + jnp.where(at == spec.C - 1, extra, 0.0) for x, extra in heads]
    return jnp.concatenate(found, axis=1)


def _rounded(spec: Spec, x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32) if spec.half else x
