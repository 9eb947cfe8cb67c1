"""From raw inputs, as a kernel's blocks hold them, to the rows of stacks, and back."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gates import Options, gate, write_strength
from pallas_kernels.kda.tpu import heads
from pallas_kernels.kda.tpu.chunk import Rows
from pallas_kernels.kda.tpu.stacks import Masks, Spec, select

Array = jax.Array


class Raw(NamedTuple):
    """Raw q, k, g [N,R,K], and slope and bias of the gate [N,R,K] or scalars."""

    q: Array
    k: Array
    g: Array
    slope: Array
    bias: Array


def prepare(options: Options, raw: Raw) -> tuple[Array, Array, Array]:
    """Norms, scale and gate, as in `gates.prepare`."""
    q, k, g, slope, bias = raw
    if options.use_qk_l2norm:
        q, k = _normalise(options.scale, q), _normalise(1.0, k)
    else:
        q = q * options.scale
    if options.use_gate_in_kernel:
        g = gate(g + bias, slope, options.lower_bound)
    return q, k, g


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(scale: float, x: Array) -> Array:
    """scale * gates.l2norm(x), in fewer operations.

    A column of sums fills registers as badly as can be, so few operations may touch it:
    one exponential and one logarithm instead of a root, and no division backward.
    """
    return x * (scale * _inverse_norm(x))


def _inverse_norm(x: Array) -> Array:
    squares = jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6
    return jnp.exp2(-0.5 * jnp.log2(squares))


def _normalise_save(scale, x):
    return _normalise(scale, x), x


def _normalise_backward(scale, x, dy):
    inverse = _inverse_norm(x)
    y = x * inverse
    dx = dy - y * jnp.sum(y * dy, axis=-1, keepdims=True)
    return (dx * (scale * inverse),)


_normalise.defvjp(_normalise_save, _normalise_backward)


def stack_groups(spec: Spec, heads: int, stacks: int) -> list[range]:
    """Heads of some stacks each.

    Elementwise work is done for a few stacks at a time: enough to hide latency, few
    enough for the registers.
    """
    width = min(stacks * spec.G, heads)
    starts = range(0, heads, width)
    return [range(at, min(at + width, heads)) for at in starts]


def join(parts: list[Any]) -> Any:
    """Trees of some stacks each -> one of all."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def stack(spec: Spec, found: list[Array]) -> Array:
    """Heads [C,D] -> stacks [N,R,D]."""
    stacks = range(0, len(found), spec.G)
    return jnp.stack([jnp.concatenate(found[at : at + spec.G]) for at in stacks])


def unstack(spec: Spec, x: Array) -> list[Array]:
    """Stacks [N,R,D] -> heads [C,D]."""
    starts = range(0, spec.R, spec.C)
    return [rows[at : at + spec.C] for rows in x for at in starts]


def read(
    refs: dict[str, Any], spec: Spec, masks: Masks, which: range, name: str
) -> Array:
    """A block [1,C,HB,D] as stacks, 0 for padding."""
    return select(masks.real, stack(spec, heads.load(refs[name], which, spec.words)))


def read_raw(refs: dict[str, Any], spec: Spec, masks: Masks, which: range) -> Raw:
    q, k, g = (read(refs, spec, masks, which, name) for name in "qkg")
    if "gate" not in refs:
        return Raw(q, k, g, jnp.ones(()), jnp.zeros(()))
    shape = spec.C, q.shape[-1]
    slope, bias = (
        stack(
            spec,
            [jnp.broadcast_to(refs["gate"][row, h : h + 1], shape) for h in which],
        )
        for row in (0, 1)
    )
    return Raw(q, k, g, slope, bias)


def read_strength(refs, spec: Spec, masks: Masks, which: range, options) -> Array:
    """beta as columns of stacks, [N,R,1]."""
    b_CH = jnp.transpose(write_strength(refs["beta"][0, 0], options))
    columns = [b_CH[:, h : h + 1] for h in which]
    return select(masks.real, stack(spec, columns))


def make_rows(refs, spec: Spec, masks: Masks, which, prepared, options) -> Rows:
    q, k, g = prepared
    return Rows(
        q,
        k,
        select(masks.real, g),
        read(refs, spec, masks, which, "v"),
        read_strength(refs, spec, masks, which, options),
    )


def read_states(ref: Any, spec: Spec) -> list[Array]:
    """States [HB,V,K], as a list over the heads of a stack of [N,V,K] in float32."""
    found = range(ref.shape[0])
    return [
        jnp.stack([ref[h].astype(jnp.float32) for h in found[g :: spec.G]])
        for g in range(spec.G)
    ]


def write_states(ref: Any, spec: Spec, states: list[Array]) -> None:
    for g, of_stacks in enumerate(states):
        for n, state in enumerate(of_stacks):
            ref[n * spec.G + g] = state
