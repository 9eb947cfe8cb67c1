"""KDA kernels, made for every generation by the TPU compiler.

Too much memory on the chip is an error of the compiler. What is left to check is the
memory around the kernels.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax import topology
from pallas_kernels.kda import kda, kda_step

SLICES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
SETTINGS = {
    "lower_bound": -5.0,
    "use_gate_in_kernel": True,
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
}
HEADS, WIDTH, TIME = 96, 128, 8192


def compiled(slice_name, function, shapes):
    mesh = Mesh(topology.devices(slice_name)[:1], ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*arrays)
    made = lowered.compile()
    assert "tpu_custom_call" in made.as_text()
    return made.memory_analysis()


def arrays(*tokens, heads=HEADS, values=None):
    half, wide = jnp.bfloat16, jnp.float32
    shapes = {name: ((*tokens, heads, WIDTH), half) for name in "qkvg"}
    if values is not None:
        shapes["v"] = (*tokens, heads, values), wide
    shapes["beta"] = (*tokens, heads), half
    shapes["A_log"], shapes["dt_bias"] = ((heads,), wide), ((heads * WIDTH,), wide)
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def forward(x):
    return kda(**x, **SETTINGS)[0]


def backward(x, do):
    return jax.vjp(forward, x)[1](do)


@pytest.mark.parametrize("name", SLICES)
def test_forward_and_backward(name):
    x = arrays(1, TIME)
    memory = compiled(name, backward, (x, x["v"]))
    chunks = TIME // 64
    states = 2 * chunks * HEADS * WIDTH * WIDTH
    a = 2 * TIME * HEADS * 64
    # Besides: o, which nobody asked for, and beta and its gradient in float32.
    rest = 2 * TIME * HEADS * WIDTH + 4 * 4 * TIME * HEADS
    assert memory.temp_size_in_bytes < states + a + 1.1 * rest


@pytest.mark.parametrize("name", SLICES)
def test_a_million_tokens_need_no_more_on_the_chip(name):
    memory = compiled(name, forward, (arrays(1, 2**20, heads=8),))
    # beta in float32, rows of 64 tokens on tiles of 128, laid out anew: 2 % of q to g.
    assert memory.temp_size_in_bytes < 4 * (4 * 2 * 2**20 * 8)


@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_a_million_tokens(name):
    """Four heads: a v5e has 16 GB for these, their gradients and the states."""
    tokens, heads = 2**20, 4
    x = arrays(1, tokens, heads=heads)
    memory = compiled(name, backward, (x, x["v"]))
    states = 2 * tokens // 64 * heads * WIDTH * WIDTH
    a = 2 * tokens * heads * 64
    rest = 2 * tokens * heads * WIDTH + 4 * 4 * tokens * heads
    assert memory.temp_size_in_bytes < states + a + 1.1 * rest


@pytest.mark.parametrize("heads", [6, 12])
def test_heads_that_a_device_has_of_k3(heads):
    """Of its 96 heads over 16 and over 8 devices; their pairs fill no tiles."""
    x = arrays(1, 256, heads=heads)
    compiled("v5p:2x2x1", backward, (x, x["v"]))


def compile_plain(dtype, width, chunk_size=64):
    """Forward and backward without gate or norms, on the chip with the least memory."""
    wide = (1, 256, 8, width)
    x = dict.fromkeys("qkvg", jax.ShapeDtypeStruct(wide, dtype))
    x["beta"] = jax.ShapeDtypeStruct(wide[:3], dtype)

    def forward(x):
        return kda(**x, lower_bound=-5.0, chunk_size=chunk_size)[0]

    compiled("v5p:2x2x1", lambda x, do: jax.vjp(forward, x)[1](do), (x, x["v"]))


@pytest.mark.parametrize("width", [64, 256])
def test_other_widths(width):
    compile_plain(jnp.bfloat16, width)


@pytest.mark.parametrize(("width", "chunk_size"), [(128, 64), (256, 16)])
def test_float32(width, chunk_size):
    compile_plain(jnp.float32, width, chunk_size)


@pytest.mark.parametrize(("width", "chunk_size"), [(256, 64), (256, 32), (128, 128)])
def test_float32_that_does_not_fit_is_refused(width, chunk_size):
    with pytest.raises(ValueError, match="smaller chunk_size, bfloat16 inputs"):
        compile_plain(jnp.float32, width, chunk_size)


@pytest.mark.parametrize("name", SLICES)
def test_step(name):
    x = arrays(64)
    state = jax.ShapeDtypeStruct((64, HEADS, WIDTH, WIDTH), jnp.float32)
    memory = compiled(name, lambda x, s: kda_step(**x, state=s, **SETTINGS), (x, state))
    assert memory.temp_size_in_bytes < 2**26


def test_pieces_of_time():
    """The columns that `context_kda` adds, on the chip with the least memory."""
    x = arrays(1, 4096, heads=8, values=2 * WIDTH)
    compiled("v5p:2x2x1", backward, (x, x["v"]))


def test_documents_and_an_unbounded_gate():
    x = arrays(1, 4000, heads=8) | {
        "segment_ids": jax.ShapeDtypeStruct((1, 4000), jnp.int32)
    }
    settings = {**SETTINGS, "lower_bound": None}
    compiled("v5e:2x2", lambda x: kda(**x, **settings)[0], (x,))
