"""What the chunk-parallel kernels share: loading, gate, masks, decay factors.

A chunk has C tokens. Decays are in log2 units. Pairs of tokens i > j are grouped into
levels. Each level has a border between its columns and its rows, and exp2(G_i - G_j)
is the product of a row factor and a column factor that meet at the border:

- any gate: levels 1, 2, 4, ..., C/2 hold the blocks of that size left of the diagonal.
  Both factors are sums of log decays over a stretch of tokens, hence at most 1. One
  tile serves both roles: a token is a row if its block comes second, else a column.
- bounded gate, bfloat16: one level holds all pairs inside blocks of 32 tokens. The
  factors are taken from the block's start, with 115 added to one exponent and taken off
  the other: 32 tokens at -5 span 231 of the 253 exponents that float32 has. Two thirds
  of the products of matrices are saved.

Nothing depends on later tokens, so outputs do not change with the future to the last
bit. Entries outside a level may be infinite; they are selected away, never multiplied.
"""

import triton
import triton.language as tl

# Parameters stand in rows; one a line would hide the kernels.
# fmt: off

LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(115.0)
UNSHIFT = tl.constexpr(2.0**-115)
# Far below where exp2 underflows. Keeps -inf out of sums.
LOWEST = tl.constexpr(-1.5e3)


@triton.constexpr_function
def levels(C):
    """log2 of the chunk size."""
    return C.bit_length() - 1


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp2(x):
    """2^x in one instruction; denormal results become 0."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )


@triton.jit
def exp2_again(x):
    """exp2 that is computed anew wherever it is written, to spare registers."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1
        )


@triton.jit
def rounded(x):
    """float32 values rounded to bfloat16: the convert to one value is a slow one."""
    if INTERPRETED:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000; }""",
            "=f,=f,f,f", [x], tl.float32, True, 2,
        )


@triton.jit
def reciprocal(x):
    """1 / x in one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )


@triton.jit
def power_of_two(x):
    """The power of two at or below a float32 >= 0, within 2^100 of 1; 1 for 0."""
    bits = tl.cast(x, tl.int32, bitcast=True) & 0x7F800000
    power = tl.clamp(tl.cast(bits, tl.float32, bitcast=True), 2.0**-100, 2.0**100)
    return tl.where(x > 0.0, power, 1.0)


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    """a @ b with operands rounded to DOT, accumulated in float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="tf32x3")


@triton.jit
def sum_rows(ones, x, DOT: tl.constexpr):
    """ones @ x for a matrix of 0 and 1, nearly in float32: x goes in two halves."""
    if tl.float32 == DOT:
        total = tl.dot(ones, x, input_precision="tf32x3")
    else:
        high = x.to(DOT)
        low = (x - high.to(tl.float32)).to(DOT)
        total = tl.dot(ones, low, tl.dot(ones, high))
    return total


@triton.jit
def stretch_sum(w, x, DOT: tl.constexpr):
    """`sum_rows` for a mask."""
    return sum_rows(w.to(tl.float32).to(DOT), x, DOT)


@triton.jit
def place_of(tile, T, HV: tl.constexpr, C: tl.constexpr):
    """Value head, batch row and first token of a tile: heads run fastest."""
    chunks = tl.cdiv(T, C)
    return tile % HV, tile // (HV * chunks), (tile // HV) % chunks * C


@triton.jit
def load_vector(ptr, tile, part, COUNT: tl.constexpr, C: tl.constexpr):
    """Row `part` of tile number `tile` of an array of [COUNT,C] tiles."""
    return tl.load(ptr + tile.to(tl.int64) * (COUNT * C) + part * C + tl.arange(0, C))


@triton.jit
def row_pointers(
    ptr, n, start, h, column, T,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """Pointers [C,W] to one head of [B,T,H,D], from token `start` and `column` on."""
    ptr += ((n.to(tl.int64) * T + start) * H + h) * D + column
    return ptr + (tl.arange(0, C)[:, None] * (H * D) + tl.arange(0, W)[None, :])


@triton.jit
def load_rows(
    ptr, n, start, h, column, real, T,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """Tile [C,W] of one head of [B,T,H,D] as float32; 0 where not real."""
    at = row_pointers(ptr, n, start, h, column, T, H, D, C, W)
    return tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_rows(
    ptr, x, n, start, h, column, T,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):
    """Writes a tile [C,W] to one head of [B,T,H,D]."""
    at = row_pointers(ptr, n, start, h, column, T, H, D, C, W)
    inside = start + tl.arange(0, C) < T
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def tile_pointers(ptr, tile, R: tl.constexpr, D: tl.constexpr):
    """Pointers to tile number `tile` of an array of [R,D] tiles."""
    ptr += tl.cast(tile, tl.int64) * (R * D)
    return ptr + (tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def codes(ids, n, at, T):
    """2 * run + real of tokens `at`; what fills up the last chunk joins it."""
    return tl.load(ids + n.to(tl.int64) * T + tl.minimum(at, T - 1))


@triton.jit
def real_rows(ids, n, start, T, C: tl.constexpr, PACKED: tl.constexpr):
    """[C] bool: the token exists and is no padding."""
    at = start + tl.arange(0, C)
    real = at < T
    if PACKED:
        real = real & (codes(ids, n, at, T) % 2 == 1)
    return real


@triton.jit
def borders(ids, n, start, T, C: tl.constexpr):
    """Runs whose state enters and leaves the chunk."""
    row = ids + n.to(tl.int64) * T
    enter = tl.load(row + tl.maximum(start - 1, 0)) // 2
    leave = tl.load(row + tl.minimum(start + C, T) - 1) // 2
    return tl.where(start == 0, 0, enter), leave


@triton.jit
def run_masks(ids, n, start, T, C: tl.constexpr, PACKED: tl.constexpr):
    """same [C,C], enters [C], leaves [C], passes: see `segments.ChunkMasks`."""
    if PACKED:
        run = codes(ids, n, start + tl.arange(0, C), T) // 2
        enter, leave = borders(ids, n, start, T, C)
        same = run[:, None] == run[None, :]
        return same, run == enter, run == leave, enter == leave
    else:
        yes = tl.full([C], 1, tl.int1)
        return yes[:, None] & yes[None, :], yes, yes, tl.full([], 1, tl.int1)


@triton.jit
def log2_decay(g, slope, bias, bound, real, GATE: tl.constexpr):
    """Log2 of the decay per token [...,K]; `gates.log_decay` in log2 units.

    bias and real come with axes of length 1 for the others of g.
    """
    if GATE == "bounded":
        steep = -LOG2E * slope
        part = reciprocal(1.0 + exp2(g * steep + bias * steep))
        return part * tl.where(real, bound * LOG2E, 0.0)
    elif GATE == "softplus":
        decay = tl.maximum(-(slope * LOG2E) * softplus(g + bias), LOWEST)
        return tl.where(real, decay, 0.0)
    else:
        return tl.where(real, tl.maximum(g * LOG2E, LOWEST), 0.0)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + exp2(tl.abs(x) * -LOG2E))


@triton.jit
def write_strength(raw, real, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """[C] float32; `gates.write_strength`, 0 where not real."""
    b = raw
    if SIGMOID:
        b = sigmoid(raw)
    if DOUBLE:
        b = 2.0 * b
    return tl.where(real, b, 0.0)


@triton.jit
def grid_ij(C: tl.constexpr):
    return tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]


@triton.jit
def level_mask(size, C: tl.constexpr):
    """Pairs whose row block of `size` tokens follows its column block as a couple."""
    i, j = grid_ij(C)
    return ((i // size) % 2 == 1) & (j // size == i // size - 1)


@triton.jit
def pair_factor(g, level, C: tl.constexpr, DOT: tl.constexpr):
    """Row and column factor [C,K] of the blocks of 2^level tokens."""
    i, j = grid_ij(C)
    own = i >> level == j >> level
    to_border = tl.where((i >> level) % 2 == 1, i >= j, i < j)
    return exp2(stretch_sum(own & to_border, g, DOT))


@triton.jit
def wide_row(since):
    return exp2_again(since + SHIFT)


@triton.jit
def wide_column(since):
    return exp2_again(-(since + SHIFT))


@triton.jit
def to_block_end(column, first, rest, C: tl.constexpr, WIDE: tl.constexpr):
    """Decay after the token up to the end of its block, from column factors."""
    first_block = tl.arange(0, C)[:, None] < WIDE
    first, rest = exp2(first + SHIFT)[None, :], exp2(rest + SHIFT)[None, :]
    return column * tl.where(first_block, first, rest)


@triton.jit
def outer_factors(g, C: tl.constexpr, DOT: tl.constexpr):
    """exp2(G) and exp2(G_last - G), [C,K]: decay since the start and up to the end."""
    i, j = grid_ij(C)
    return exp2(stretch_sum(i >= j, g, DOT)), exp2(stretch_sum(i < j, g, DOT))


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, DOT: tl.constexpr):
    """(I + L)^-1 for strictly lower triangular L, by block doubling.

    From inverses X of blocks of size b, X - X E X are those of size 2b, with E the
    blocks of L that join two neighbours. Stays as small as the result, unlike a power
    series in L. X holds blocks alone, so E is where X L X is looked at, and L itself
    can stay in shared memory.
    """
    i, j = grid_ij(C)
    # The highest bit in which i and j differ tells the level at which they meet.
    apart = i ^ j
    x = tl.where(i == j, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
    for level in range(1, levels(C)):
        joined = dot(dot(x, lower, DOT), x, DOT)
        x = tl.where(apart >> level == 1, -joined, x)
    return x
