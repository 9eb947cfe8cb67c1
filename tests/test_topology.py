"""Names of slices that are not here, and what their devices can do."""

import importlib.util

import jax
import pytest
from jax.experimental import topologies

from kimi_jax import hardware, topology
from kimi_jax.errors import UserError


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in (
        "TPU_SKIP_MDS_QUERY",
        "ALLOW_MULTIPLE_LIBTPU_LOAD",
        "TPU_WORKER_HOSTNAMES",
    ):
        monkeypatch.setenv(name, "1")


def test_no_name_is_this_machine():
    assert topology.devices("") == jax.devices()


@pytest.mark.parametrize(
    "name", ["v9:2x2", "v5p", "v5p:4", "4x4x4", "v5e:2x2x2x2", "v5p:4x4x", "V5P:4x4x4"]
)
def test_a_name_that_means_nothing(name):
    words = "write GENERATION:SHAPE with a generation of v4, v5e, v5p, v6e, tpu7x"
    with pytest.raises(UserError, match=words) as refused:
        topology.devices(name)
    assert str(refused.value).startswith(f"--topology={name}: ")


def test_without_the_compiler_the_message_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e \.\[tpu\]") as refused:
        topology.devices("v5e:2x2")
    assert "\n" not in str(refused.value)


def test_a_shape_that_the_compiler_refuses(monkeypatch):
    def refuse(**_):
        raise RuntimeError("INVALID_ARGUMENT: bad shape\nand a long trace")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UserError) as refused:
        topology.devices("v5p:3x3x3")
    message = str(refused.value)
    assert "refuses it (INVALID_ARGUMENT: bad shape); v4, v5p and tpu7x" in message
    assert "trace" not in message


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("TPU v5 lite", hardware.TPU_V5E),
        ("TPU v5", hardware.TPU_V5P),
        ("TPU7x", hardware.TPU_7X),
        ("TPU v99", None),
        ("NVIDIA H100 80GB HBM3", hardware.H100),
        ("NVIDIA H100 NVL", hardware.H100_NVL),
        ("NVIDIA H200", hardware.H200),
        ("NVIDIA H2000", None),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_their_kind(kind, row):
    assert hardware.look_up(kind) is row
    assert hardware.peak_flops(kind) == (None if row is None else row.flops)


def test_every_generation_has_a_row():
    for kind in hardware.GENERATIONS.values():
        assert hardware.look_up(kind) is not None, kind
