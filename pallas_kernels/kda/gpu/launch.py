"""Starts Triton kernels from JAX, on a GPU or, for tests, in Triton's interpreter.

With TRITON_INTERPRET=1 in the environment before triton is imported, `triton.jit` makes
functions that run on the CPU, one operation of numpy at a time. They are called back
from JAX, so that whatever surrounds the kernels runs as it does on a GPU.
"""

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Array = jax.Array
_ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps its place in a global


def interpreting(kernel: Any) -> bool:
    """Whether kernels run in Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def launch(
    kernel: Any,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    programs: int,
    *,
    num_warps: int,
    num_stages: int,
    **settings: Any,
) -> tuple[Array, ...]:
    """Runs `programs` instances of a kernel.

    Args:
      kernel: a `triton.jit` function whose parameters are the names below.
      inputs: arrays by parameter.
      outputs: shapes and dtypes by parameter, in the order of the parameters. One that
        is an input too is written in place, where XLA need not keep the input.
      programs: instances, on a grid of one axis.
      num_warps: warps an instance.
      num_stages: default depth of the pipelines that copy ahead.
      **settings: numbers and constants by parameter.

    Returns:
      The outputs.
    """
    if interpreting(kernel):
        made = _interpret(kernel, inputs, outputs, programs, settings)
        return _vary_like(made, inputs)
    import jax_triton

    given = [name for name in kernel.arg_names if name in inputs]
    results = list(outputs)
    aliases = {given.index(n): results.index(n) for n in results if n in inputs}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="input_output_aliases")
        made = jax_triton.triton_call(
            **inputs,
            **settings,
            kernel=kernel,
            out_type=tuple(outputs.values()),
            grid=(programs,),
            num_warps=num_warps,
            num_stages=num_stages,
            input_output_aliases=aliases,
            name=kernel.fn.__name__,
        )
    return _vary_like(made, inputs)


def varying(x: Array) -> frozenset[str]:
    """Axes of the surrounding `jax.shard_map` over which an array differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_axes(dx: Array, x: Array) -> Array:
    """Gives a gradient the mesh axes of its input: sums over those x does not have."""
    if surplus := varying(dx) - varying(x):
        dx = jax.lax.psum(dx, tuple(surplus))
    if missing := varying(x) - varying(dx):
        dx = jax.lax.pcast(dx, tuple(missing), to="varying")
    return dx


def _vary_like(made, inputs):
    """Results of a kernel differ over every mesh axis that an input differs over."""
    axes = frozenset().union(*(varying(x) for x in inputs.values()))
    if not axes:
        return tuple(made)
    return tuple(jax.lax.pcast(x, tuple(axes), to="varying") for x in made)


def _interpret(kernel, inputs, outputs, programs, settings):
    def run(arrays):
        given = {name: Buffer(np.array(x)) for name, x in arrays.items()}
        # NaN shows what a kernel forgets to write.
        made = {
            name: Buffer(np.full(x.shape, np.nan).astype(x.dtype))
            for name, x in outputs.items()
            if name not in given
        }
        with _ONE_AT_A_TIME, _small_numbers():
            kernel[(programs,)](**given, **made, **settings)
        return tuple((made | given)[name].array for name in outputs)

    return jax.pure_callback(
        run, tuple(outputs.values()), inputs, vmap_method="sequential"
    )


@contextlib.contextmanager
def _small_numbers() -> Iterator[None]:
    """Has numpy keep denormal numbers, as a GPU does; XLA's threads take them for 0."""
    libm = ctypes.CDLL("libm.so.6")
    before = ctypes.create_string_buffer(64)  # more than any fenv_t
    libm.fegetenv(before)
    libm.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        libm.fesetenv(before)


class Buffer:
    """A numpy array with what Triton's interpreter asks of a torch tensor."""

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)
        self.dtype = self.array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Buffer":
        return self

    def cpu(self) -> "Buffer":
        return self

    def new_empty(self, size: int, device: str) -> "Buffer":
        del size, device
        return self

    def set_(self, *storage: Any) -> None:
        """Already in place."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other: "Buffer") -> None:
        assert other is self
