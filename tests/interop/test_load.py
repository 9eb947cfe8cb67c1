"""Loading: native equals published, meshes, and runs that start from a release."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from kimi_jax import canonical, config, sharding
from kimi_jax.interop import load, mxfp4, to_native
from kimi_jax.interop.entries import InteropError
from kimi_jax.interop.load import load_model, load_variables
from kimi_jax.train import checkpoint, loop, session
from kimi_jax.train import checkpoint_files as files
from kimi_jax.train.step import init_state
from tests import tiny
from tests.interop import goldens


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    kinds = jax.tree.map(lambda x, y: x.dtype == y.dtype, a, b)
    assert all(jax.tree.leaves(kinds))


@pytest.mark.parametrize("name", goldens.ALL)
def test_native_and_published_are_the_same_model(name, tmp_path):
    to_native.to_native(goldens.FOLDER / name, tmp_path / "native", workers=2)
    there, native = load_model(tmp_path / "native")
    here, published = load_model(goldens.FOLDER / name)
    assert there == here
    same(native, published)
    # What the caller's model asks for: float32 from whatever is stored, packed or not.
    wide = load_variables(tmp_path / "native", here)
    same(wide, load_model(goldens.FOLDER / name, dtype="float32")[1])
    if here.vision is not None:
        text = dataclasses.replace(here, vision=None)
        only = load_variables(tmp_path / "native", text)
        assert wide["params"].pop("vision")
        same(only, wide)


def test_orbax_reads_what_was_converted(tmp_path):
    folder = goldens.FOLDER / "kimi_linear_tiny"
    to_native.to_native(folder, tmp_path / "native", workers=2)
    found = files.find(tmp_path / "native")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        for name, x in files.stored_arrays(found).items()
    }
    read = files.read_arrays(found, stored)
    model, variables = load_model(tmp_path / "native")
    flat = canonical.flatten(model, variables)
    assert read.keys() == flat.keys()
    same(read, flat)


def test_packed_experts_arrive_dequantised():
    tensors = goldens.tensors(goldens.FOLDER / "k3_tiny_mxfp4")
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    wanted = mxfp4.unpack(
        tensors[f"{name}_packed"], tensors[f"{name}_scale"], np.float32
    )
    _, variables = load_model(goldens.FOLDER / "k3_tiny_mxfp4")
    stage = variables["params"]["stage_0"]["block_0_run_1"]["sublayer_1"]
    found = stage["moe"]["experts_down"][0, 0, 3]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.T)


def test_shards_are_those_of_the_whole(tmp_path):
    folder = goldens.FOLDER / "k3_tiny"
    model, whole = load_model(folder)
    axes = {"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 2}
    cfg = dataclasses.replace(tiny.make(), model=model, mesh=config.Mesh(**axes))
    mesh = sharding.make_mesh(dataclasses.replace(cfg))
    _, parts = load_model(folder, mesh)
    same(parts, whole)
    unembed = parts["params"]["output"]["unembed"]
    assert unembed.sharding.shard_shape(unembed.shape) == (16, 160)


def test_a_run_starts_from_a_release(tmp_path):
    folder = goldens.FOLDER / "kimi_linear_tiny"
    cfg = tiny.make()
    model, variables = load_model(folder, dtype="float32")
    cfg = dataclasses.replace(
        cfg, model=model, train=dataclasses.replace(cfg.train, init_from=str(folder))
    )
    transform = loop.make_transform(cfg)
    source = session.start_source(cfg, tmp_path)
    with checkpoint.Checkpointer(tmp_path, cfg, {}) as checkpoints:
        notes = _Notes()
        mesh = sharding.make_mesh(cfg)
        state = session.first_state(cfg, mesh, transform, checkpoints, notes, source)
    assert int(state.step) == 0
    same(state.params, variables["params"])
    same(state.balance, variables["balance"])
    fresh = jax.eval_shape(lambda: init_state(cfg, transform))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim > 2]
    assert moments and not any(np.any(x) for x in moments)
    assert any("reading parameters from" in line for line in notes.lines)


def test_a_run_of_another_model_is_refused_before_it_begins(tmp_path):
    folder = goldens.FOLDER / "kimi_linear_tiny"
    cfg = tiny.make(f"train.init_from={folder}")
    with pytest.raises(InteropError, match="does not fit this model"):
        loop.train(cfg, str(tmp_path / "run"), console=Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_scalars_are_read_into_their_stack():
    """As the weights of additive residuals are, one a layer."""

    class Scalars:
        def __init__(self):
            self.arrays = {name: np.zeros(()) for name in "ab"}

        def rows(self, name):
            return 1

        def read(self, name, start, stop):
            return np.float32({"a": 1.5, "b": 2.5}[name])

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((2,), np.float32, sharding=place)
    with ThreadPoolExecutor(2) as pool:
        read = load._read_array(Scalars(), [("a", (0,)), ("b", (1,))], like, pool)
    assert read.tolist() == [1.5, 2.5]


class _Notes:
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)
