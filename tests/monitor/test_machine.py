"""Each problem of a machine is found, and comes with its fix."""

import os
import pathlib

import jax
import pytest

from kimi_jax.monitor import machine


def test_this_machine_is_fit():
    found = [*machine.software(), *machine.limits(pathlib.Path("."))]
    rows, devices = machine.devices({"JAX_PLATFORMS": "cpu"})
    assert len(devices) == 8 and rows[0].value == "8 x cpu"
    found += [*rows, machine.round_trip(devices), *machine.kernels("cpu")]
    assert [finding for finding in found if finding.broken] == []
    values = {finding.name: finding.value for finding in found}
    assert values["jax"] == jax.__version__
    assert values["round trip"].startswith("over 8 devices in")
    assert values["kda kernel"].startswith("xla: ")


def test_a_sum_over_devices_that_is_wrong(monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: jax.lax.pmax(x, axis))
    found = machine.round_trip(jax.devices())
    assert found.broken and found.value == "wrong numbers: sum over the devices"
    assert "NCCL_DEBUG=INFO" in found.fix


def test_a_backend_that_does_not_start(monkeypatch):
    def fail():
        raise RuntimeError("no such device\nmore")

    monkeypatch.setattr(jax, "devices", fail)
    (found,), devices = machine.devices({"JAX_PLATFORMS": "tpu"})
    assert not devices and found.broken and found.value == "no such device"
    assert "JAX_PLATFORMS=tpu is set: unset it" in found.fix
    (found,), _ = machine.devices({})
    assert found.broken and "end other processes that hold" in found.fix


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cpu", "", True, False), "kimi_jax[gpu]"),
        (("cpu", "", True, True), "kimi_jax[tpu]"),
        (("cpu", "cpu", True, True), None),
        (("cpu", "", False, False), None),
        (("gpu", "", True, False), None),
    ],
)
def test_an_accelerator_that_jax_does_not_use(arguments, words):
    found = machine.unused(*arguments)
    assert (found is None) == (words is None)
    assert found is None or (found.broken and words in found.fix)


def test_folders(tmp_path, monkeypatch):
    found = machine.disk(tmp_path / "a" / "b")
    assert not found.broken and f"free at {tmp_path / 'a' / 'b'}" in found.value
    (tmp_path / "file").write_text("")
    assert "name another folder" in machine.disk(tmp_path / "file").fix
    assert machine.disk(tmp_path / "file" / "x").broken
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    found = machine.disk(tmp_path)
    assert "one more than is kept must fit" in found.fix and not found.broken


def test_compile_cache(tmp_path, monkeypatch):
    assert "JAX_COMPILATION_CACHE_DIR=DIR" in machine.compile_cache(None).fix
    assert machine.compile_cache("gs://bucket/cache").fix == ""
    (tmp_path / "program").write_bytes(b"x" * 5_000_000)
    found = machine.compile_cache(str(tmp_path))
    assert found.value == f"{tmp_path}, 1 files, 0.01 GB" and not found.fix
    assert "not there yet" in machine.compile_cache(str(tmp_path / "new")).value
    assert machine.compile_cache(str(tmp_path / "program" / "x")).broken
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written" in machine.compile_cache(str(tmp_path)).fix


def test_limits():
    assert "ulimit -n 65536" in machine.open_files(1024).fix
    assert machine.open_files(65536).fix == machine.open_files(-1).fix == ""
    assert "--shm-size" in machine.shared_memory(64 * 10**6, gpus=True).fix
    assert machine.shared_memory(64 * 10**6, gpus=False).fix == ""


def test_versions(monkeypatch):
    versions = {"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.1", "libtpu": "0.0.40"}
    monkeypatch.setattr(machine, "_version", versions.get)
    found = {finding.name: finding for finding in machine.software()}
    assert found["jax-cuda13-plugin"].value == "0.11.1, but jaxlib is 0.11.2"
    assert "install one version of both" in found["jax-cuda13-plugin"].fix
    assert found["libtpu"].fix == "" and "jax-cuda12-plugin" not in found
    assert found["flax"].broken and not found["kimi_jax"].broken
    assert "pip install -e ." in found["kimi_jax"].fix
