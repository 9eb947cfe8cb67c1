"""Launches a kernel over the grid of (batch row, block of heads, chunk)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import target
from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.tpu.stacks import Spec

Array = jax.Array

# Rows of a stack: the height of a matrix unit.
ROWS = 128
# Heads of a program: blocks of [..., HV, D] must have a multiple of 8, or all.
HEADS = 8
# Share of the on-chip memory that a kernel may take; the rest is the compiler's.
SHARE = 0.75
# Float32 arrays of rows [C,K] that a head of a kernel keeps while it works, about: for
# bfloat16, and for float32, whose products take six passes. The second separates what
# the compiler of v5p (64 MiB) and v5e (128 MiB) took from what it refused.
VALUES = 24
WIDE_VALUES = 128


class Block(NamedTuple):
    """A block's shape, and where it lies, from (batch row, block of heads, chunk)."""

    shape: tuple[int, ...]
    at: Callable[[Any, Any, Any], tuple]


class Sizes(NamedTuple):
    """Sizes of one call; HB heads a program."""

    B: int
    T: int
    HV: int
    K: int
    V: int
    HB: int
    spec: Spec

    @property
    def chunks(self) -> int:
        return -(-self.T // self.spec.C)

    @property
    def dtype(self) -> Any:
        """Of what is saved for the backward pass."""
        return jnp.bfloat16 if self.spec.half else jnp.float32

    def tokens(self, width: int) -> Block:
        """A block of [B,T,HV,width]."""
        shape = (1, self.spec.C, self.HB, width)
        return Block(shape, lambda b, h, t: (b, t, h, 0))

    def per_chunk(self, *shape: int) -> Block:
        """A block of [B,chunks,heads,...]."""
        zeros = (0,) * (len(shape) - 1)
        return Block((1, 1, *shape), lambda b, h, t: (b, t, h, *zeros))

    def states(self) -> Block:
        """A block of [B,HV,K,V], the same for all chunks."""
        return Block((1, self.HB, self.K, self.V), lambda b, h, t: (b, h, 0, 0))


def make_sizes(inputs: Inputs, packed: bool, options: Options) -> Sizes:
    """Sizes of a call; q and k already have HV heads."""
    B, T, HV, V = inputs.v.shape
    K, C = inputs.q.shape[-1], options.chunk_size
    HB = HEADS if HV % HEADS == 0 else HV
    G = max(g for g in range(1, HB + 1) if HB % g == 0 and g * C <= max(ROWS, C))
    half = inputs.q.dtype == inputs.k.dtype == jnp.bfloat16
    wide = half and options.lower_bound is not None
    spec = Spec(C, G, half, wide, packed or T % C != 0, words=not interpreting())
    return Sizes(B, T, HV, K, V, HB, spec)


def interpreting() -> bool:
    """Without a TPU, Pallas's interpreter plays one, and checks what no TPU does."""
    return target.platform() != "tpu"


def on_chip_limit() -> int:
    """Bytes of on-chip memory that a kernel may take."""
    return int(SHARE * pltpu.get_tpu_info().vmem_capacity_bytes)


def check_on_chip_memory(sizes: Sizes, blocks: list[Block]) -> None:
    """Raises ValueError if a program clearly cannot fit on the chip.

    Blocks count twice, because the next ones are loaded meanwhile.
    """
    spec = sizes.spec
    values, narrower = (VALUES, "") if spec.half else (WIDE_VALUES, "bfloat16 inputs, ")
    entries = 2 * sum(math.prod(block.shape) for block in blocks)
    needed = values * 4 * spec.C * sizes.HB * sizes.K
    needed += entries * jnp.dtype(sizes.dtype).itemsize
    if needed > on_chip_limit():
        raise ValueError(
            f"chunk_size={spec.C} with {sizes.HB} heads of K={sizes.K}, V={sizes.V} in "
            f"{jnp.dtype(sizes.dtype)} "
            f"takes about {needed >> 20} MiB of on-chip memory, and a kernel may take "
            f"{on_chip_limit() >> 20} on this TPU; use a smaller chunk_size, "
            f"{narrower}or implementation='xla'"
        )


def compiler_params(
    *semantics: Literal["parallel", "arbitrary"],
) -> pltpu.CompilerParams:
    """How the axes of the grid may run, and the memory that a kernel may take."""
    limit = None if interpreting() else on_chip_limit()
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def interpreter() -> Any:
    """How Pallas should interpret a kernel; False: compile it."""
    if not interpreting():
        return False
    return pltpu.InterpretParams(
        detect_races=True,
        # Of v4 and v5p. Parallel axes of the grid are spread over them; one core alone
        # never races.
        num_cores_or_threads=2,
        uninitialized_memory="nan",
        # Blocks may reach past the last token; kernels mask what they read there.
        out_of_bounds_reads="uninitialized",
    )


def gate_parameters(inputs: Inputs, HV: int, K: int) -> Array:
    """exp(A_log) and dt_bias, [2,HV,K]."""
    slope, bias = jnp.ones((HV, K)), jnp.zeros((HV, K))
    if inputs.A_log is not None:
        slope = slope * jnp.exp(inputs.A_log.astype(jnp.float32))[:, None]
    if inputs.dt_bias is not None:
        bias = inputs.dt_bias.astype(jnp.float32).reshape(HV, K)
    return jnp.stack([slope, bias])


def launch(
    kernel: Callable[..., None],
    sizes: Sizes,
    options: Options,
    inputs: dict[str, tuple[Array, Block]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, Block]],
    scratch: Mapping[str, tuple[int, ...]],
    *,
    reverse: bool = False,
) -> dict[str, Array]:
    """Runs `kernel(inputs, outputs, scratch, spec, options)` with blocks by name.

    Args:
      inputs: arrays, and the block of each program.
      outputs: likewise, of the results.
      scratch: shapes of float32 arrays that last from chunk to chunk.
      reverse: take the last chunk first.
    """

    def body(*refs: Any) -> None:
        named, at = [], 0
        for names in (inputs, outputs, scratch):
            named.append(dict(zip(names, refs[at : at + len(names)], strict=True)))
            at += len(names)
        kernel(*named, spec=sizes.spec, options=options)

    def spec(block: Block) -> pl.BlockSpec:
        def index(b: Any, h: Any, t: Any) -> tuple:
            return block.at(b, h, sizes.chunks - 1 - t if reverse else t)

        return pl.BlockSpec(block.shape, index)

    if not interpreting():
        blocks = [block for _, block in (*inputs.values(), *outputs.values())]
        check_on_chip_memory(sizes, blocks)
    results = pl.pallas_call(
        body,
        grid=(sizes.B, sizes.HV // sizes.HB, sizes.chunks),
        in_specs=[spec(block) for _, block in inputs.values()],
        out_specs=[spec(block) for _, block in outputs.values()],
        out_shape=[array for array, _ in outputs.values()],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpreter(),
        name=f"kda_{kernel.__name__}",
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))
