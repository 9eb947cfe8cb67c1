"""Muon on a mesh is Muon on one device; bfloat16 is close to it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from kimi_jax import sharding
from kimi_jax.train import muon
from tests import tiny

# Names of the table of `sharding`; every way in which a matrix can lie. Of "up" there
# are 3, so that some devices have none; "gate" joins them.
SHAPES = {
    "up": (3, 8, 16),
    "gate": (2, 2, 8, 16),
    "latent_down": (1, 16, 4),
    "q": (2, 8, 4, 6),
    "o": (4, 4, 8),
    "f_b": (4, 2, 8),
    "experts_down": (4, 8, 4),
}
DIMENSIONS = dict.fromkeys(SHAPES, MuonDimensionNumbers(-2, -1)) | {
    "q": MuonDimensionNumbers(-3, -1),
    "o": MuonDimensionNumbers((-3, -2), -1),
    "f_b": MuonDimensionNumbers(-3, (-2, -1)),
}


def draw(dtype):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in SHAPES.items()}


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "expert": 2, "context": 2},
        {"fsdp": 2, "expert": 2, "tensor": 2},
    ],
    ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()),
)
def test_a_mesh_changes_no_update(sizes):
    """To the rounding of sums in another order, which five steps multiply by 500."""
    with jax.enable_x64(True):
        tree = draw(np.float64)
        want = jax.jit(lambda tree: muon.orthogonalise(tree, DIMENSIONS))(tree)
        mesh = jax.make_mesh(
            tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES
        )
        where = sharding.state_shardings(mesh, tree)
        with jax.set_mesh(mesh):
            run = jax.jit(
                lambda tree: muon.orthogonalise(tree, DIMENSIONS), out_shardings=where
            )
            got = run(jax.device_put(tree, where))
        chex.assert_trees_all_close(got, want, rtol=1e-9, atol=1e-12)


def test_singular_values_are_near_one_in_bfloat16_too():
    x_bmn = draw(jnp.float32)["up"]
    for dtype, room in ((jnp.float32, 0.0), (jnp.bfloat16, 0.05)):
        made = muon.newton_schulz(x_bmn.astype(dtype))
        assert made.dtype == dtype
        values = np.linalg.svd(np.asarray(made, np.float64), compute_uv=False)
        # The interval of these coefficients; bfloat16 has 8 bits.
        assert values.min() > 0.67 - room and values.max() < 1.21 + room


def test_the_dtype_is_of_the_work_and_not_of_the_update():
    tree = {"up": draw(jnp.float32)["up"]}
    made = {
        dtype: muon.orthogonalise(tree, {"up": DIMENSIONS["up"]}, dtype)["up"]
        for dtype in (None, jnp.bfloat16)
    }
    assert {x.dtype for x in made.values()} == {jnp.dtype(jnp.float32)}
    apart = np.abs(made[None] - made[jnp.bfloat16]).max()
    # Rounding of 2^-9 grows up to 3.4-fold in each of five steps.
    assert 0 < apart < 0.2


def test_zeros_stay_zeros():
    tree = {"up": jnp.zeros((2, 4, 8))}
    made = muon.orthogonalise(tree, {"up": MuonDimensionNumbers(-2, -1)})
    assert not np.any(made["up"])


def test_a_matrix_split_in_its_middle_is_refused():
    mesh = sharding.make_mesh(tiny.make("mesh.tensor=2"))
    axes = {"q": MuonDimensionNumbers(-3, (-1, -2))}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="inner axes"):
        muon.orthogonalise({"q": jnp.zeros((8, 4, 6))}, axes)
