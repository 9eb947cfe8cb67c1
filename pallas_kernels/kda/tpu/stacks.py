"""What the kernels compute with: the tokens of a chunk, a stack of heads at a time.

A matrix unit multiplies 128 rows or more at a time and a chunk has 64 tokens. So the
rows of G heads are stacked, [N,R,K] with R = G * C, and matrices over pairs of tokens
are block diagonal, [N,R,R]. All N stacks of a program take each operation together:
they do not depend on each other, which hides how long a product takes. Everything here
is a function of values. bfloat16 inputs are multiplied in bfloat16 and added up in
float32; float32 inputs keep float32 throughout.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

LOG2E = 1.4426950408889634
# Tokens whose decay a float32 exponent can hold at the lowest bound, -5 a token, if it
# is shifted: 32 * 5 * log2(e) = 231 lies between 2^-116 and 2^115.
WIDE = 32
SHIFT = 115.0
UNSHIFT = 2.0**-115
# Rows that a register holds in bfloat16.
TILE = 16
# Far below where exp2 underflows to zero. Keeps -inf out of sums.
LOWEST = -1.5e3


class Spec(NamedTuple):
    """Static properties of a stack.

    C: tokens of a chunk. G: heads. half: multiply in bfloat16. wide: the decay is
    bounded, so that blocks of 32 tokens take a short cut. packed: some tokens are
    padding, or other documents. words: see `heads.py`; False in the interpreter, which
    does not know such loads.
    """

    C: int
    G: int
    half: bool
    wide: bool
    packed: bool
    words: bool = True

    @property
    def R(self) -> int:
        return self.C * self.G

    @property
    def block(self) -> int:
        """Tokens of the blocks that the short cut handles; 1 without."""
        return min(WIDE, self.C) if self.wide else 1

    @property
    def sizes(self) -> list[int]:
        """Blocks whose pairs of neighbours are still to be related."""
        sizes, size = [], self.block
        while size < self.C:
            sizes.append(size)
            size *= 2
        return sizes


class Masks(NamedTuple):
    """Documents of a stack; None stands for all tokens.

    i, j [R,R]: row and column. same [R,R]: one head and document. enters, leaves [R,1]:
    the token belongs to the document whose state enters or leaves the chunk. passes
    [1,1]: both are one document. real [R,1]: no padding.
    """

    i: Array
    j: Array
    same: Array
    enters: Array | None
    leaves: Array | None
    passes: Array | None
    real: Array | None


class Factors(NamedTuple):
    """Decay of the tokens of a stack, as factors of at most 1 but for `near`.

    pre, post [N,R,K]: since the chunk's start, and until its end. pairs: per level of
    blocks, which pairs (mask [R,R]), and the factors of their rows and columns.
    """

    pre: Array
    post: Array
    pairs: list[tuple[Array, Array, Array]]


def make_masks(spec: Spec, codes_1R: Array | None) -> Masks:
    """Masks from `codes`: bits for real, enters, leaves, and above them the run."""
    shape = spec.R, spec.R
    i = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    j = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    same = i // spec.C == j // spec.C
    if codes_1R is None:
        return Masks(i, j, same, None, None, None, None)
    codes_R1 = jnp.transpose(jnp.broadcast_to(codes_1R, (8, spec.R)))[:, :1]
    same &= (codes_1R >> 3) == (codes_R1 >> 3)
    real, enters, leaves = ((codes_R1 & bit) != 0 for bit in (1, 2, 4))
    return Masks(i, j, same, enters, leaves, enters[spec.C - 1 : spec.C], real)


def select(mask: Array | None, x: Array) -> Array:
    """x where the mask holds, else 0."""
    return x if mask is None else jnp.where(mask, x, 0.0)


def dot(spec: Spec, a: Array, b: Array, contract: str = "nn") -> Array:
    """a @ b in float32 for every stack; `contract` "nt" transposes b, "tn" a.

    One operand may be a matrix that all stacks share.
    """
    dims = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}[contract]
    dtype = jnp.bfloat16 if spec.half else jnp.float32

    def one(a: Array, b: Array) -> Array:
        return jax.lax.dot_general(
            # Rounding a stack of matrices at once makes Mosaic move them about.
            a.astype(dtype),
            b.astype(dtype),
            (((dims[0],), (dims[1],)), ((), ())),
            precision=None if spec.half else jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    if a.ndim == 2:
        return jnp.stack([one(a, x) for x in b])
    return jnp.stack([one(x, y) for x, y in zip(a, b, strict=True)])


def add_up(spec: Spec, which: Array, x: Array) -> Array:
    """Sums the rows of x [N,R,K] that the mask [R,R] selects for each row.

    A product with 0 and 1. In bfloat16 x is cut in two, which keeps 16 bits.
    """
    ones = which.astype(jnp.float32)
    if not spec.half:
        return dot(spec, ones, x)
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    low = x - high
    return dot(spec, ones, high) + dot(spec, ones, low)


def by_head(spec: Spec, x: Array) -> list[Array]:
    """The rows [N,C,...] of each head of the stacks."""
    return [x[..., g * spec.C : (g + 1) * spec.C, :] for g in range(spec.G)]


def make_factors(spec: Spec, masks: Masks, decay: Array) -> Factors:
    """Factors from the log2 of the decay [N,R,K]."""
    make = _wide_factors if spec.wide else _level_factors
    return make(spec, masks, decay)


def _neighbours(masks: Masks, size: int) -> Array:
    """Pairs whose row's block follows its column's block as a couple."""
    # Shifts: divisions of vectors take many operations.
    shift = size.bit_length() - 1
    i, j = masks.i >> shift, masks.j >> shift
    return ((i & 1) == 1) & (j == i - 1)


def _level_factors(spec: Spec, masks: Masks, decay: Array) -> Factors:
    """Any decay: exponents are sums of log decays, never differences.

    Blocks left of the diagonal have a border between columns and rows. A token is a
    row if its block comes second and a column if it comes first, so that one factor,
    the decay between it and the border, serves both roles.
    """
    decay = jnp.maximum(decay, LOWEST)
    i, j = masks.i, masks.j
    head = i // spec.C == j // spec.C
    pre = jnp.exp2(add_up(spec, head & (j <= i), decay))
    post = jnp.exp2(add_up(spec, head & (j > i), decay))
    pairs = []
    for size in spec.sizes:
        shift = size.bit_length() - 1
        inside, odd = i >> shift == j >> shift, (i >> shift & 1) == 1
        # Not `where`, which Mosaic does not have for masks.
        stretch = inside & ((odd & (j <= i)) | (~odd & (j > i)))
        factor = jnp.exp2(add_up(spec, stretch, decay))
        pairs.append((_neighbours(masks, size), factor, factor))
    return Factors(pre, post, pairs)


def _wide_factors(spec: Spec, masks: Masks, decay: Array) -> Factors:
    """Bounded decay: pairs inside a block of 32 tokens take one product."""
    i, j, size = masks.i, masks.j, spec.block
    inside = (i // size == j // size) & (j <= i)
    since = add_up(spec, inside, decay)
    row, col = jnp.exp2(since + SHIFT), jnp.exp2(-SHIFT - since)
    pairs = [(inside & (j < i), row, col)]
    total = [since[:, at + size - 1 : at + size] for at in range(0, spec.R, size)]
    pre = row * UNSHIFT
    post = _scale_blocks(col, [t + SHIFT for t in total])
    for size in spec.sizes:
        pairs.append((_neighbours(masks, size), pre, post))
        even, odd = total[::2], total[1::2]
        pre = _scale_blocks(pre, [x for t in even for x in (None, t)])
        post = _scale_blocks(post, [x for t in odd for x in (t, None)])
        total = [a + b for a, b in zip(even, odd, strict=True)]
    return Factors(pre, post, pairs)


def _scale_blocks(x: Array, exponents: list[Array | None]) -> Array:
    """Multiplies blocks of rows by 2^exponent, [N,1,K] each; None leaves one alone."""
    size = x.shape[1] // len(exponents)
    blocks = []
    for n, exponent in enumerate(exponents):
        block = x[:, n * size : (n + 1) * size]
        blocks.append(block if exponent is None else block * jnp.exp2(exponent))
    return jnp.concatenate(blocks, axis=1)


def unit_lower_inverse(spec: Spec, masks: Masks, lower: Array) -> Array:
    """Inverts I + L for strictly lower triangular L [N,R,R], by block doubling.

    See `chunks.unit_lower_inverse`. X stays in float32 between products.
    """
    x = jnp.where(masks.i == masks.j, 1.0, 0.0)
    x = x - jnp.where(_neighbours(masks, 1), lower, 0.0)
    size = 2
    while size < spec.C:
        between = jnp.where(_neighbours(masks, size), lower, 0.0)
        if size < TILE:
            x = x - dot(spec, x, dot(spec, between, x))
        else:
            x = _join_neighbours(spec, x, between, size)
        size *= 2
    return x


def _join_neighbours(spec: Spec, x: Array, between: Array, size: int) -> Array:
    """X - X E X, of which only the rows of every second block differ from X."""
    starts = range(0, spec.R, 2 * size)
    even = [x[:, at : at + size] for at in starts]
    odd = jnp.concatenate([x[:, at + size : at + 2 * size] for at in starts], axis=1)
    rows = [between[:, at + size : at + 2 * size] for at in starts]
    inner = dot(spec, jnp.concatenate(rows, axis=1), x)
    # Rows of odd blocks meet no column of even ones: their rows here may hold anything.
    inner = jnp.concatenate([y for y in _cut(inner, size) for _ in (0, 1)], axis=1)
    joined = _cut(odd - dot(spec, odd, inner), size)
    pairs = zip(even, joined, strict=True)
    return jnp.concatenate([y for pair in pairs for y in pair], axis=1)


def _cut(x: Array, size: int) -> list[Array]:
    """Blocks of rows."""
    return [x[:, at : at + size] for at in range(0, x.shape[1], size)]
