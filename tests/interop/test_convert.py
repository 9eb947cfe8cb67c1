"""Conversion both ways: bytes, kills, memory, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kimi_jax.interop import from_native, safetensors_files, sources, staging, to_native
from kimi_jax.interop.entries import InteropError
from kimi_jax.train import checkpoint_files as files
from tests.interop import goldens


@pytest.mark.parametrize("name", goldens.ALL)
def test_round_trips_are_byte_identical(name, tmp_path):
    source = goldens.FOLDER / name
    to_native.to_native(source, tmp_path / "native", workers=2)
    folder = files.find(tmp_path / "native")
    assert files.find_damage(folder) is None
    from_native.from_native(tmp_path / "native", tmp_path / "back", workers=2)
    goldens.same_tensors(source, tmp_path / "back")
    assert (tmp_path / "back/config.json").read_bytes() == (
        source / "config.json"
    ).read_bytes()
    # The package reads what we wrote.
    with safe_open(tmp_path / "back/model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert load_file(tmp_path / "back/model.safetensors").keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "native"]


def test_shards_go_back_into_their_files(tmp_path):
    values = goldens.config()
    goldens.write_sharded(tmp_path / "hf", values, files=3)
    to_native.to_native(tmp_path / "hf", tmp_path / "native", workers=2)
    from_native.from_native(tmp_path / "native", tmp_path / "back", workers=2)
    for file in sorted((tmp_path / "hf").iterdir()):
        assert (tmp_path / "back" / file.name).exists()
        if file.suffix == ".safetensors":
            ours, theirs = load_file(tmp_path / "back" / file.name), load_file(file)
            assert {n: x.tobytes() for n, x in ours.items()} == {
                n: x.tobytes() for n, x in theirs.items()
            }


def test_release_dtypes_on_the_way_out(tmp_path):
    source = goldens.FOLDER / "kimi_linear_tiny"
    to_native.to_native(source, tmp_path / "native", workers=2)
    arguments = {"workers": 2, "dtype": "release"}
    from_native.from_native(tmp_path / "native", tmp_path / "back", **arguments)
    with safe_open(tmp_path / "back/model.safetensors", "np") as file:
        kinds = {n: file.get_slice(n).get_dtype() for n in file.keys()}  # noqa: SIM118
    wide = {name.split(".", 3)[-1] for name, kind in kinds.items() if kind == "F32"}
    assert wide == {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "self_attn.o_norm.weight",
        *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
        "block_sparse_moe.gate.e_score_correction_bias",
    }
    assert set(kinds.values()) == {"F32", "BF16"}


SLOW_JOBS = """
import sys, time
from kimi_jax.interop import to_native
real = to_native.zlib.crc32
def crc32(data, *rest):
    if not rest:
        time.sleep(0.02)
    return real(data, *rest)
class Zlib:
    pass
Zlib.crc32 = staticmethod(crc32)
to_native.zlib = Zlib
print("begin", flush=True)
to_native.to_native(sys.argv[1], sys.argv[2], workers=2)
"""


def test_a_killed_conversion_goes_on(tmp_path):
    source, target = goldens.FOLDER / "kimi_linear_tiny", tmp_path / "native"
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_JOBS, str(source), str(target)],
        stdout=subprocess.PIPE,
    )
    progress = tmp_path / "native.part" / staging.LIST
    while not (progress.exists() and progress.read_text().count("\n") > 10):
        assert child.poll() is None
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not target.exists()
    done = progress.read_text().count("\n") - 1
    seen = []
    to_native.to_native(source, target, workers=2, show=seen.append)
    assert seen[0].skipped > 0 and done > 5
    assert not progress.parent.exists()
    from_native.from_native(target, tmp_path / "back", workers=2)
    goldens.same_tensors(source, tmp_path / "back")


def test_what_changed_since_is_not_continued(tmp_path):
    source = goldens.copy("kimi_linear_tiny", tmp_path / "hf")
    with pytest.raises(RuntimeError, match="stop here"):
        to_native.to_native(source, tmp_path / "native", workers=1, show=_stop)
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(InteropError, match="its source has changed since"):
        to_native.to_native(source, tmp_path / "native", workers=1)


def test_bytes_that_did_not_arrive_are_written_again(tmp_path):
    source, target = goldens.FOLDER / "kimi_linear_tiny", tmp_path / "native"
    damaged = []

    def damage(progress):
        chunks = (tmp_path / "native.part").rglob("params.embedding.embed/0.0")
        if progress.phase == "writing" and progress.done == progress.total:
            (file,) = chunks
            file.write_bytes(b"\0" + file.read_bytes()[1:])
            damaged.append(file)

    with pytest.raises(InteropError, match=r"params\.embedding\.embed.*run the same"):
        to_native.to_native(source, target, workers=1, show=damage)
    assert damaged and not target.exists()
    to_native.to_native(source, target, workers=1)
    assert files.find_damage(files.find(target)) is None


def _stop(progress):
    raise RuntimeError("stop here")


LIMITED = """
import resource, sys
from kimi_jax.interop import from_native, to_native
sizes = open("/proc/self/statm").read().split()
used = int(sizes[5]) * resource.getpagesize()  # data and stack, what RLIMIT_DATA counts
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[4]),) * 2)
to_native.to_native(sys.argv[1], sys.argv[2], workers=2)
from_native.from_native(sys.argv[2], sys.argv[3], workers=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
@pytest.mark.slow
def test_memory_is_a_few_tensors_whatever_the_model(tmp_path):
    # 400 MB of tensors of at most 2 MB each, with room for 200 MB: threads' stacks and
    # arenas take most of that.
    values = goldens.config(num_experts=64, hidden_size=512, moe_intermediate_size=512)
    total = goldens.write_sharded(tmp_path / "hf", values, files=8)
    room = 200 << 20
    assert total > 2 * room
    done = subprocess.run(
        [sys.executable, "-c", LIMITED]
        + [str(tmp_path / name) for name in ("hf", "native", "back")]
        + [str(room)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for file in (tmp_path / "hf").glob("*.safetensors"):
        ours, theirs = load_file(tmp_path / "back" / file.name), load_file(file)
        for name, x in theirs.items():
            np.testing.assert_array_equal(ours[name], x)


def broken(tmp_path, change):
    """The message about a golden whose tensors `change` altered."""
    source = goldens.copy("kimi_linear_tiny", tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    return refusal(source, tmp_path)


def refusal(source, tmp_path):
    with pytest.raises(InteropError) as caught:
        to_native.to_native(source, tmp_path / "native", workers=1)
    assert not (tmp_path / "native").exists()
    assert not (tmp_path / "native.part").exists()
    return str(caught.value)


def test_missing_left_over_and_misshapen_tensors_are_listed(tmp_path):
    norm = "model.norm.weight"

    def change(tensors):
        tensors["model.extra.weight"] = tensors.pop(norm)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()

    message = broken(tmp_path, change)
    assert f"{norm} [64]: missing" in message
    assert "lm_head.weight: shape [255, 64], the config says [256, 64]" in message
    assert "model.extra.weight: in no table of names" in message


def test_quantised_tensors_without_a_word_in_the_config(tmp_path):
    source = goldens.copy("k3_tiny_mxfp4", tmp_path / "hf")
    values = goldens.config("k3_tiny_mxfp4")
    del values["text_config"]["quantization_config"]
    (source / "config.json").write_text(json.dumps(values))
    assert "no quantization_config" in refusal(source, tmp_path)


def test_damaged_files_are_named(tmp_path):
    source = goldens.copy("kimi_linear_tiny", tmp_path / "hf")
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    message = refusal(source, tmp_path)
    assert "is cut short, the file ends 8 bytes before it does" in message
    file.write_bytes(whole[:4])
    assert "no safetensors file, or is cut short" in refusal(source, tmp_path)
    file.write_bytes(whole.replace(b'"F32"', b'"F8X"', 1))
    assert "has dtype F8X" in refusal(source, tmp_path)
    for about in (b"null", b"3", b'{"dtype":"F32","shape":[1]}'):
        header = b'{"one":' + about + b"}"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert "the header of one is damaged" in refusal(source, tmp_path)
    index = source / safetensors_files.INDEX
    index.write_text('{"weight_map": {"a": 3}}')
    assert "3 is not a file name" in refusal(source, tmp_path)
    index.write_text('{"weight_map": 3}')
    assert "has no weight_map" in refusal(source, tmp_path)


def test_a_config_that_is_no_json_is_named(tmp_path):
    source = goldens.copy("kimi_linear_tiny", tmp_path / "hf")
    (source / "config.json").write_text("{")
    assert sources.is_published(source)
    assert "config.json is not JSON" in refusal(source, tmp_path)


def test_two_tensors_with_one_name(tmp_path):
    source = goldens.copy("kimi_linear_tiny", tmp_path / "hf")
    file = source / "model.safetensors"
    whole = file.read_bytes()
    a, b = b"layers.1.self_attn.A_log", b"layers.2.self_attn.A_log"
    file.write_bytes(whole.replace(a, b, 1))
    assert "two tensors have the name model.layers.2" in refusal(source, tmp_path)
    file.write_bytes(whole)
    save_file({"lm_head.weight": np.zeros(1)}, source / "second.safetensors")
    message = refusal(source, tmp_path)
    assert "lm_head.weight is in model.safetensors and again in second" in message


def test_missing_shards_and_foreign_indices(tmp_path):
    goldens.write_sharded(tmp_path / "hf", goldens.config(), files=3)
    index = tmp_path / "hf" / safetensors_files.INDEX
    text = index.read_text()
    index.write_text(text.replace("00003-of-00003", "00002-of-00003"))
    assert "but it is not" in refusal(tmp_path / "hf", tmp_path)
    index.write_text(text)
    (tmp_path / "hf/model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path / "hf", tmp_path)
    assert "names 1 of 3 files that are not there: model-00002-of-00003" in message


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "native").mkdir()
    (tmp_path / "native/notes").write_text("mine")
    with pytest.raises(InteropError, match="exists; name another folder"):
        to_native.to_native(
            goldens.FOLDER / "kimi_linear_tiny", tmp_path / "native", workers=1
        )
    assert [p.name for p in tmp_path.iterdir()] == ["native"]
