"""Reads and writes single heads of blocks [1,C,HB,D], as arrays come: heads inside.

Rows of one head lie HB rows apart, which a load with a stride picks up at no cost, if
an element has 32 bits. Two heads of bfloat16 share such an element, so they are loaded
together and told apart by a shift.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

Array = jax.Array

_HIGH = 0xFFFF0000


def load(ref: Any, which: range, words: bool) -> list[Array]:
    """Some heads of a block, [C,D] each, in float32; pairs, if heads are even."""
    heads = ref.shape[2]
    if not (words and _paired(ref)):
        return [ref[0, :, h, :].astype(jnp.float32) for h in which]
    pairs, found = _words(ref), []
    for pair in sorted({h // 2 for h in which}):
        word = pairs[pl.ds(pair, ref.shape[1], heads // 2), :]
        for bits in (word << 16, word & jnp.uint32(_HIGH)):
            found.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
    first = which[0] % 2
    return found[first : first + len(which)]


def store(ref: Any, heads: list[Array], words: bool) -> None:
    """Writes all heads of a block."""
    if not (words and _paired(ref)):
        for h, x in enumerate(heads):
            ref[0, :, h, :] = x.astype(ref.dtype)
        return
    pairs = _words(ref)
    for pair, (low, high) in enumerate(zip(heads[::2], heads[1::2], strict=True)):
        both = (_bits(low) >> 16) | (_bits(high) & jnp.uint32(_HIGH))
        pairs[pl.ds(pair, ref.shape[1], len(heads) // 2), :] = both


def _paired(ref: Any) -> bool:
    """Whether words hold two heads.

    Mosaic has loads with a stride up to 128 lanes, and joins two axes if its tiles,
    which have as many rows as there are pairs but at most 4, do not reach over pairs.
    """
    heads, width = ref.shape[2:]
    return ref.dtype == jnp.bfloat16 and width <= 128 and heads in (4, 8, 16)


def _words(ref: Any) -> Any:
    """[1,C,HB,D] of bfloat16 as [C*HB/2,D] of pairs of heads."""
    _, C, heads, width = ref.shape
    return ref.bitcast(jnp.uint32).reshape(C * heads // 2, width)


def _bits(x: Array) -> Array:
    """Bits of x, rounded to bfloat16."""
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
