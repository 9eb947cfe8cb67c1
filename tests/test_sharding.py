"""Every parameter has a place; a mesh that does not fit says what would."""

import dataclasses
import math
import runpy

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax import canonical, config_io, sharding
from kimi_jax.errors import UserError
from kimi_jax.train.step import init_state, make_transform
from tests import tiny
from tests.modules import vision_cases


def published(name: str, *overrides: str):
    name, _, argument = name.partition(":")
    values = runpy.run_path(f"configs/{name}.py")["get_config"](
        *filter(None, [argument])
    )
    return config_io.from_dict(values, overrides)


def state_of(cfg):
    """(mesh, shapes, shardings) of its training state; no device is asked for."""
    sizes = dataclasses.asdict(cfg.mesh)
    mesh = AbstractMesh(tuple(sizes[a] for a in sharding.AXES), sharding.AXES)
    transform = make_transform(cfg)
    shapes = jax.eval_shape(lambda: init_state(cfg, transform))
    return mesh, shapes, sharding.state_shardings(mesh, shapes)


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {canonical.path_name(path): leaf for path, leaf in leaves}


MESH = ("mesh.fsdp=2", "mesh.tensor=2")
CONFIGS = {
    "tiny": lambda: tiny.make(*MESH),
    "adamw": lambda: tiny.make(*MESH, "optimizer.kind=adamw"),
    "gqa": lambda: tiny.make(*MESH, "model.attention=gqa"),
    "other-gates": lambda: tiny.make(
        *MESH,
        "model.kda.gate=softplus",
        "model.kda.gate_granularity=head",
        "model.kda.output_gate=low_rank",
        "model.mla.q_rank=None",
        "model.moe.latent_width=None",
        "model.moe.latent_norm=False",
        "optimizer.momentum_dtype=bfloat16",
    ),
    "k3": lambda: published("k3"),
    "k3-adamw": lambda: published("k3", "optimizer.kind=adamw"),
    "vision": lambda: vision_cases.make(*MESH),
    "kimi-linear": lambda: published("kimi_linear_48b", *MESH, "mesh.expert=4"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_array_of_the_state_has_a_place_that_divides_it(name):
    _, shapes, shardings = state_of(CONFIGS[name]())
    where = named(shardings)
    for path, leaf in named(shapes).items():
        where[path].shard_shape(leaf.shape)  # raises unless it divides
        if path.rsplit("/", 1)[-1] in sharding.PARAMETERS:
            axes = sharding.PARAMETERS[path.rsplit("/", 1)[-1]]
            assert 0 <= leaf.ndim - len(axes) <= 2 or leaf.ndim == 0, path


@pytest.mark.parametrize("name", ["tiny", "adamw", "vision", "k3", "k3-adamw"])
def test_momenta_lie_with_their_parameters(name):
    _, shapes, shardings = state_of(CONFIGS[name]())
    where = named(shardings.params)
    leaves, found = named(shapes.optimizer), set()
    for path, sharded in named(shardings.optimizer).items():
        owner = next((p for p in where if path.endswith(f"/{p}")), None)
        if owner is None:
            assert leaves[path].size <= 15, path  # counters, and Muon's coefficients
            continue
        assert sharded.spec == where[owner].spec, path
        found.add(owner)
    assert found == set(where)


@pytest.mark.parametrize("length", [8192, 65536, 1048576])
def test_k3_keeps_no_large_array_whole(length):
    """Nearly all is split over all 4,096 devices: a device keeps 1.2 even shares."""
    mesh, shapes, shardings = state_of(published(f"k3:length={length}"))
    assert mesh.size == 4096
    where, params = named(shardings.params), named(shapes.params)
    local = {path: where[path].shard_shape(leaf.shape) for path, leaf in params.items()}
    for path, leaf in params.items():
        parts = leaf.size / math.prod(local[path])
        if "experts_" in path:
            assert parts == 4096, path
        elif leaf.size > 1e6:
            assert parts >= 8, path
    even = sum(leaf.size for leaf in params.values()) / mesh.size
    assert sum(map(math.prod, local.values())) < 1.25 * even


@pytest.mark.parametrize(
    ("name", "shape", "local"),
    [
        ("q", (5, 3, 96, 8, 16), (5, 3, 4, 4, 16)),
        ("o", (8, 16, 96), (4, 16, 4)),
        ("kv_b", (32, 8, 16), (32, 4, 16)),
        ("A_log", (8,), (4,)),
        ("up", (96, 128), (4, 64)),
        ("experts_down", (6, 24, 32, 64), (6, 2, 16, 32)),
        ("latent_up", (6, 32, 96), (6, 32, 4)),
        ("router", (96, 24), (4, 24)),
        ("bias", (6, 24), (6, 24)),
        ("embed", (256, 96), (128, 4)),
    ],
)
def test_what_a_device_holds(name, shape, local):
    sizes = {"data": 2, "fsdp": 2, "expert": 4, "context": 3, "tensor": 2}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    where = sharding.state_shardings(mesh, {"stage_0": {name: leaf}})
    assert where["stage_0"][name].shard_shape(shape) == local


def test_a_name_without_a_place_says_where_to_add_it():
    leaf = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    path = (jax.tree_util.DictKey("stage_0"), jax.tree_util.DictKey("secret"))
    message = "'stage_0/secret' has no place; add 'secret' to PARAMETERS in kimi_jax/"
    with pytest.raises(ValueError, match=message):
        sharding.parameter_spec(path, leaf)
    # A counter of an optimizer needs no name.
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    assert sharding.parameter_spec(path, scalar) == P()


ONE = dict.fromkeys(sharding.AXES, 1)


@pytest.mark.parametrize(
    ("sizes", "overrides", "messages"),
    [
        (
            {"data": 3},
            (),
            ["data=3 does not divide train.batch_size / micro_"
             "batches = 4; try --config.mesh.data=2 or --config.mesh.data=4"],
        ),
        (
            {"context": 3},
            ("model.moe.num_experts=6", "model.moe.num_active=2"),
            ["context=3 does not divide train.seq_len = 32; try "
             "--config.mesh.context=2 or --config.mesh.context=4",
             "context=3 does not divide model.width = 16; try "
             "--config.mesh.context=2 or --config.mesh.context=4"],
        ),
        (
            {"fsdp": 3},
            ("train.batch_size=6",),
            ["fsdp=3 does not divide model.width = 16; try --config.mesh.fsdp=2 or "
             "--config.mesh.fsdp=4",
             "fsdp=3 does not divide model.moe.latent_width = 8; try "
             "--config.mesh.fsdp=2 or --config.mesh.fsdp=4"],
        ),
        (
            {"expert": 8},
            ("train.batch_size=8",),
            ["expert=8 does not divide model.moe.num_experts = 4; try "
             "--config.mesh.expert=2 or --config.mesh.expert=4"],
        ),
        (
            {"expert": 4, "context": 2},
            (),
            ["expert=4 * context=2 does not divide model.moe.num_experts = 4; try "
             "--config.mesh.expert=1 or --config.mesh.expert=2"],
        ),
        (
            {"tensor": 4},
            (),
            ["tensor=4 does not divide model.kda.num_heads = 2; try "
             "--config.mesh.tensor=1 or --config.mesh.tensor=2",
             "tensor=4 does not divide model.mla.num_heads = 2; try "
             "--config.mesh.tensor=1 or --config.mesh.tensor=2"],
        ),
        (
            {"tensor": 4},
            ("model.attention=gqa",),
            ["tensor=4 does not divide model.gqa.num_kv_heads = 2; try "
             "--config.mesh.tensor=1 or --config.mesh.tensor=2"],
        ),
        # No size of the largest axis would help, so the other is named.
        (
            {"fsdp": 4, "expert": 3},
            ("model.moe.num_experts=6", "model.moe.num_active=2"),
            ["fsdp=4 * expert=3 does not divide train.batch_size / micro_"
             "batches = 4; try a smaller --config.mesh.expert",
             "fsdp=4 * expert=3 does not divide model.width = 16; try a smaller "
             "--config.mesh.expert"],
        ),
    ],
)  # fmt: skip
def test_a_misfit_names_the_nearest_sizes_that_fit(sizes, overrides, messages):
    cfg = tiny.make(*overrides)
    found = sharding.misfits(cfg, ONE | sizes)
    assert found == [f"config.mesh: {message}" for message in messages]


def test_what_fits_has_no_misfit():
    assert not sharding.misfits(tiny.make(), ONE)
    sizes = {"data": 2, "fsdp": 2, "expert": 1, "context": 4, "tensor": 2}
    assert not sharding.misfits(tiny.make(), sizes)
    cfg = published("k3")
    assert not sharding.misfits(cfg, dataclasses.asdict(cfg.mesh))


def test_minus_one_takes_the_devices_that_are_left():
    mesh = sharding.make_mesh(tiny.make("mesh.data=-1", "mesh.tensor=2"))
    sizes = {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert dict(mesh.shape) == sizes
    assert mesh.axis_names == sharding.AXES
    # Neighbours on the last axis are neighbours in the list of devices.
    assert [d.id for d in mesh.devices[1].flat] == [2, 3]
    some = sharding.make_mesh(tiny.make("mesh.context=-1"), jax.devices()[4:6])
    assert [d.id for d in some.devices.flat] == [4, 5]
    assert sharding.make_mesh(tiny.make()).size == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("mesh.data=4", "mesh.tensor=2", "mesh.context=2"),
            "config.mesh: data=4 x context=2 x tensor=2 on 8 cpu devices; use "
            "--config.mesh.data=-1 for all of them, or axes of at most 8",
        ),
        (
            ("mesh.data=-1", "mesh.context=16"),
            "config.mesh: data=-1 x context=16 on 8 cpu devices; their product, 16, "
            "must divide 8",
        ),
    ],
)
def test_devices_that_do_not_exist(overrides, message):
    with pytest.raises(UserError) as refused:
        sharding.make_mesh(tiny.make(*overrides))
    assert str(refused.value) == message


def test_all_misfits_are_told_at_once():
    cfg = tiny.make("mesh.fsdp=-1", "train.seq_len=32")
    with pytest.raises(UserError) as refused:
        sharding.make_mesh(cfg, jax.devices()[:3])
    lines = str(refused.value).splitlines()
    assert lines[0] == "the mesh does not fit:"
    assert len(lines) == 4
    for line, what in zip(lines[1:], ("batch_size", "width", "latent"), strict=True):
        assert line.startswith("  config.mesh: ") and "fsdp=3" in line and what in line


def test_a_config_with_a_mesh_that_does_not_fit_is_refused_when_it_is_read():
    with pytest.raises(UserError, match=r"tensor=4 does not divide model\.kda\."):
        tiny.make("mesh.tensor=4")


def test_describe():
    mesh = sharding.make_mesh(tiny.make("mesh.fsdp=4", "mesh.tensor=2"))
    assert sharding.describe(mesh) == "fsdp=4 x tensor=2"
    assert sharding.row_shards(mesh) == 4
    assert sharding.batch_sharding(mesh) == NamedSharding(
        mesh, P(("data", "fsdp", "expert"), "context")
    )
    assert sharding.describe(sharding.make_mesh(tiny.make())) == "one device"


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((2, 4))
    assert sharding.context_mesh() is None
    assert sharding.constrain(x, "rows", "time") is x
    with jax.set_mesh(sharding.make_mesh(tiny.make())):
        assert sharding.context_mesh() is None
