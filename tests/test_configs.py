"""Every experiment file builds, says what it is for, and K3 has its published size."""

import collections
import dataclasses
import math
import pathlib
import runpy

import jax
import pytest

from experiments import bench, weights
from kimi_jax import accounting, canonical, config_io, flops, layout, sharding
from kimi_jax.curriculum.stages import make_stages
from kimi_jax.modules import vision
from kimi_jax.sweep.settings import make_settings

FILES = sorted(
    path
    for path in pathlib.Path("configs").glob("*.py")
    if path.stem not in ("__init__", "common", "hyper")
    and not path.stem.startswith("bench_")
)
BENCHES = sorted(pathlib.Path("configs").glob("bench_*.py"))


def load(name: str, *arguments: str):
    get_config = runpy.run_path(f"configs/{name}.py")["get_config"]
    return config_io.from_dict(get_config(*arguments))


def billions(name: str, *arguments: str) -> tuple[float, float]:
    parts = accounting.parameter_parts(load(name, *arguments).model)
    return sum(p.total for p in parts) / 1e9, sum(p.active for p in parts) / 1e9


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_builds_and_says_what_it_is_for(path):
    module = runpy.run_path(str(path))
    config = config_io.from_dict(module["get_config"]())
    assert layout.plan(config.model)
    assert_says_what_it_is_for(module["__doc__"])


@pytest.mark.parametrize(
    ("name", "arguments", "lengths"),
    [
        ("curriculum_small", (), (128, 1024, 4096, 16384)),
        ("curriculum_small", ("gpu",), (8192, 65536, 262144, 1048576)),
        ("curriculum_k3", (), (8192, 65536, 262144, 1048576)),
    ],
)
def test_the_stages_of_a_curriculum_grow(name, arguments, lengths):
    module = runpy.run_path(f"configs/{name}.py")
    stages = make_stages(
        module["get_stages"](*arguments), module["get_config"](*arguments)
    )
    assert tuple(stage.config.train.seq_len for stage in stages) == lengths
    if name == "curriculum_k3":
        for stage in stages:
            alone = load("k3", f"length={stage.config.train.seq_len}")
            assert stage.config.mesh == alone.mesh
            assert stage.config.train.batch_size == alone.train.batch_size
            assert stage.config.train.micro_batches == alone.train.micro_batches


def test_every_row_of_the_ablations_is_a_sweep():
    module = runpy.run_path("configs/ablations.py")
    assert len(module["ROWS"]) == 13
    for row, said in module["ROWS"].items():
        settings = make_settings(
            module["get_hyper"](row), module["get_config"], argument=row
        )
        assert len({s.id for s in settings}) == len(settings) >= 2 * module["SEEDS"]
        assert said.__doc__ and row in module["__doc__"]
    with pytest.raises(ValueError, match="name a row, of gate, "):
        module["get_hyper"]("gates")


def test_residuals_are_compared_at_equal_compute():
    module = runpy.run_path("configs/ablations.py")
    spent = collections.defaultdict(list)
    for setting in make_settings(
        module["get_hyper"]("residuals"), module["get_config"], argument="residuals"
    ):
        cfg = setting.config
        total = cfg.train.steps * flops.step_flops(cfg)
        spent[cfg.model.num_layers].append(total)
    counts = {depth: len(totals) for depth, totals in spent.items()}
    assert counts == dict.fromkeys((6, 12, 24), 9)
    for totals in spent.values():
        assert max(totals) / min(totals) < 1.004  # a step is 1/250


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_bench_says_what_it_is_for(path):
    module = runpy.run_path(str(path))
    assert module["get_config"]().suite in bench.SUITES
    assert_says_what_it_is_for(module["__doc__"])


def assert_says_what_it_is_for(doc):
    for word in ("Question:", "Command:", "Cost:", "Expect:"):
        assert word in doc, f"does not say {word}"


@pytest.mark.parametrize("length", [8192, 65536, 262144, 1048576])
def test_k3_has_a_mesh_for_each_length(length):
    config = load("k3", f"length={length}")
    sizes = dataclasses.asdict(config.mesh)
    assert math.prod(sizes.values()) == 4096 and config.train.seq_len == length
    assert not sharding.misfits(config, sizes)
    assert config.train.batch_size * length == 2**24


@pytest.mark.parametrize("devices", [64, 128, 256])
def test_k3_has_a_mesh_to_serve_on(devices):
    config = load("k3", f"serve={devices}")
    sizes = dataclasses.asdict(config.mesh)
    assert math.prod(sizes.values()) == devices
    assert not sharding.misfits(config, sizes)
    with pytest.raises(ValueError, match=r"choose one of \[64, 128, 256\]"):
        load("k3", "serve=3")


def test_memory_to_serve_k3_is_counted():
    model = load("k3").model
    # 69 KDA layers: 96 states of 128 x 128 in float32 and tails of 3 inputs; 24 MLA
    # layers: 576 values a token.
    fixed = 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    assert weights.cache_size(model, 2**20) == (fixed, 24 * 576 * 2 * 2**20)
    rows = {row[0]: row[1:] for row in weights.device_rows(model)}
    # 5,559.0 GB of 0.9 * 141 GB: 43.8 devices; with a million tokens, 44.04.
    assert rows["NVIDIA H200"] == ("44", "44", "44", "45", "")
    assert rows["TPU v5p"][-1] == "v5p:4x4x4" and rows["TPU v5e"][-1] == "none"


def test_k3_has_its_published_size():
    total, active = billions("k3")
    assert (round(total, 2), round(active, 2)) == (2779.48, 104.19)


def test_k3_has_its_published_tower_beside_the_same_text_model():
    config = load("k3", "vision=1")
    assert dataclasses.replace(config.model, vision=None) == load("k3").model
    assert not sharding.misfits(config, dataclasses.asdict(config.mesh))
    shapes = jax.eval_shape(lambda: vision.init(config.model, jax.random.key(0)))
    totals = dict.fromkeys(("vision tower", "vision projector"), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path({"vision": shapes}):
        totals[accounting.part_of(canonical.path_name(path))] += leaf.size
    # 401.2 M and 46.1 M, as published.
    assert list(totals.values()) == [401_214_464, 46_144_512]


def test_k3_learns_from_trajectories_that_fill_a_row():
    config = load("k3", "length=1048576,layers=4,rl=1")
    alone = load("k3", "length=1048576,layers=4")
    assert config.model == alone.model and config.mesh == alone.mesh
    assert config.rl.max_tokens == 2**20 + 1 and config.rl.segment is None
    (spec,) = config.rl.environments
    assert spec.endswith("length=1024K")


def test_kimi_linear_has_its_published_size():
    total, active = billions("kimi_linear_48b")
    assert round(total, 1) == 49.1
    # With the input embedding, which the report's 3.48 B count and ours does not.
    assert round(active + 163840 * 2304 / 1e9, 2) == 3.48


def test_the_dial_ends_at_k3():
    dial, k3 = load("k3_dial", "depth=93").model, load("k3").model
    assert layout.sublayer_kinds(dial) == layout.sublayer_kinds(k3)
    # What the dial leaves at its own value: byte vocabulary, float32, GQA heads.
    own = {f: getattr(dial, f) for f in ("vocab_size", "dtype", "gqa", "attention")}
    assert dial == dataclasses.replace(k3, **own)


@pytest.mark.parametrize("depth", [2, 3, 4, 8, 12, 24])
def test_the_dial_keeps_every_mechanism(depth):
    config = load("k3_dial", f"depth={depth}")
    kinds = layout.sublayer_kinds(config.model)
    assert {"kda", "mla", "mlp", "moe"} <= set(kinds)
    assert config.model.width / depth == pytest.approx(7168 / 93, rel=0.25)


def test_the_dial_refuses_what_it_cannot_be():
    with pytest.raises(ValueError, match="depth=NUMBER"):
        load("k3_dial", "width=3")
    with pytest.raises(ValueError, match="at least 2"):
        load("k3_dial", "depth=1")
