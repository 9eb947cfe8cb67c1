"""The table of names: complete, invertible, and in agreement with the files."""

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from kimi_jax import canonical
from kimi_jax.interop import hf_config, names
from kimi_jax.interop.entries import InteropError, linear, plain, stack, transpose
from kimi_jax.interop.published import table
from kimi_jax.modules import transformer
from tests.interop import goldens


class Leaf:
    """A shape that `canonical.flatten` can index."""

    def __init__(self, shape):
        self.shape = shape

    def __getitem__(self, at):
        return Leaf(self.shape[len(at) :])


@pytest.mark.parametrize("name", goldens.ALL)
def test_the_table_names_every_array_of_the_model_once(name):
    release = hf_config.read(goldens.FOLDER / name)
    entries = table(release)
    shapes = jax.eval_shape(lambda: transformer.init(release.model, jax.random.key(0)))
    leaves = jax.tree.map(lambda x: Leaf(tuple(x.shape)), shapes)
    flat = canonical.flatten(release.model, leaves)
    wanted = {name: leaf.shape for name, leaf in flat.items()}
    assert {entry.name: entry.shape for entry in entries} == wanted
    assert len(entries) == len(wanted)


@pytest.mark.parametrize("name", goldens.ALL)
def test_the_table_names_every_tensor_of_the_files(name):
    release = hf_config.read(goldens.FOLDER / name)
    wanted = {}
    for entry in table(release):
        both = (entry,)
        if release.packed and names.can_pack(entry):
            both = names.packed(entry)
        wanted |= {n: (e.stored, len(e.stored)) for e in both for n in e.published}
    with safe_open(goldens.FOLDER / name / "model.safetensors", "np") as file:
        found = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
    assert {n: shape for n, (shape, _) in wanted.items()} == found


def test_heads_and_sides_of_a_linear():
    # Row h * K + k of the published matrix is output k of head h.
    H, K, D = 3, 2, 5
    published = np.arange(H * K * D, dtype=np.float32).reshape(H * K, D)
    ours = linear("q", "q_proj.weight", (H, K), (D,)).to_ours(published)
    for h, k, d in np.ndindex(H, K, D):
        assert ours[d, h, k] == published[h * K + k, d]
    # Column h * V + v of the output projection reads channel v of head h.
    published = np.arange(D * H * K, dtype=np.float32).reshape(D, H * K)
    ours = linear("o", "o_proj.weight", (D,), (H, K)).to_ours(published)
    for h, v, d in np.ndindex(H, K, D):
        assert ours[h, v, d] == published[d, h * K + v]


def test_entries_invert_byte_for_byte():
    rng = np.random.default_rng(0)
    padded = plain("A_log", "A_log", (3,), (8,))
    for entry in (
        linear("a", "a", (3, 4), (5,)),
        linear("a", "a", (7,), (2, 3)),
        plain("conv", "conv", (2, 3, 4), (6, 1, 4)),
        plain("A_log", "A_log", (3,), (1, 1, 3, 1)),
        padded,
    ):
        published = rng.standard_normal(entry.stored).astype(ml_dtypes.bfloat16)
        if entry is padded:
            published[3:] = 0
        ours = entry.to_ours(published)
        assert ours.shape == entry.shape and ours.dtype == published.dtype
        assert entry.to_published(ours).tobytes() == published.tobytes()
    assert stack(linear("e", "e", (3,), (2,)), ("x", "y")).shape == (2, 2, 3)


def test_padding_that_holds_something_is_refused():
    entry = plain("A_log", "layer.A_log", (3,), (8,))
    with pytest.raises(InteropError, match=r"layer\.A_log: values after the first 3"):
        entry.to_ours(np.ones(8, np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32])
def test_transpose_in_tiles_is_transpose(dtype):
    # Sizes around and beyond a tile; bytes that no float would survive as a number.
    bits = np.random.default_rng(0).integers(0, 256, (130, 3, 150), np.uint8)
    x = np.repeat(bits, np.dtype(dtype).itemsize, axis=-1).view(dtype)
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2)):
        made = transpose(x, order)
        assert made.flags.c_contiguous
        assert made.tobytes() == x.transpose(order).tobytes()
