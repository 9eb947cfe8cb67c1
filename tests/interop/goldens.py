"""The golden checkpoints, and published folders made up on the spot."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from kimi_jax.interop import published, safetensors_files
from kimi_jax.interop.hf_config import parse

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
TEXT = ("k3_tiny", "k3_tiny_mxfp4", "kimi_linear_tiny")
ALL = (*TEXT, "k3_tiny_vision")


def config(name="kimi_linear_tiny", **changes):
    """A golden's config.json; changes go to the language model's fields."""
    values = json.loads((FOLDER / name / "config.json").read_text())
    values.get("text_config", values).update(changes)
    return values


def copy(name, to):
    """A golden that a test may damage."""
    return pathlib.Path(shutil.copytree(FOLDER / name, to))


def tensors(folder):
    """{name: array}, read by us; tests compare with the package elsewhere."""
    found = safetensors_files.open_folder(folder)
    return {name: safetensors_files.read(tensor) for name, tensor in found.items()}


def same_tensors(a, b):
    """Names, shapes, dtypes and every byte of two published folders."""
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert x.tobytes() == y.tobytes(), name


def write_sharded(folder, values, files, seed=0):
    """A random published folder of the config `values` in `files` files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(seed)
    entries = published.table(parse(values))
    names = [(name, entry) for entry in entries for name in entry.published]
    places, total = {}, 0
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        made = {}
        for name, entry in names[number::files]:
            size = int(np.prod(entry.split))
            flat = np.zeros(int(np.prod(entry.stored)), np.float32)
            flat[:size] = rng.standard_normal(size, np.float32)
            made[name] = flat.reshape(entry.stored)
            places[name] = file
            total += flat.nbytes
        save_file(made, folder / file, metadata={"format": "pt"})
    index = safetensors_files.index_text(places, total)
    (folder / safetensors_files.INDEX).write_text(index)
    return total
