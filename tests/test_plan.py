"""Plans: what the compiler said, what the state takes, what would make it fit."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from kimi_jax import hlo, plan, sharding, temporaries
from kimi_jax.train.program import state_shape
from kimi_jax.train.step import init_state, make_transform
from tests import tiny


class Watched:
    """A lowered step that keeps what it compiled to."""

    def __init__(self, lowered):
        self.lowered = lowered

    def compile(self, compiler_options):
        self.options = compiler_options
        self.compiled = self.lowered.compile(compiler_options=compiler_options)
        return self.compiled


@pytest.fixture(scope="module")
def made():
    """(config, mesh, plan, the watched step) on simulated devices."""
    cfg = tiny.make(*tiny.QUICK)
    mesh = sharding.make_mesh(cfg)
    lower, seen = plan.lower_step, []

    def watched(*arguments):
        seen.append(Watched(lower(*arguments)))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "lower_step", watched)
        found = plan.make_plan(cfg, mesh, effort="O1")
    return cfg, mesh, found, seen[0]


def bytes_on_first_device(tree) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_memory_is_what_the_compiler_says(made):
    _, _, found, step = made
    assert step.options == {"optimization_level": "O1"}
    stats = step.compiled.memory_analysis()
    assert found.memory == plan.Memory(
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        stats.host_temp_size_in_bytes,
        None,
    )
    assert found.memory.arguments > 0 and found.memory.temporaries > 0
    assert found.collectives == hlo.collective_bytes(step.compiled.as_text())
    assert "all-to-all" in found.collectives


def test_a_device_reads_the_weights_of_its_own_experts():
    """Experts are split over two mesh axes; fsdp is undone before weights are used."""
    more = ("mesh.context=2", "train.micro_batches=2", "train.batch_size=8")
    cfg = tiny.make(*tiny.QUICK, *more)
    mesh = sharding.make_mesh(cfg)
    state = state_shape(cfg, mesh, make_transform(cfg))
    want = sum(
        leaf.size * 4 // (4 if "experts_" in jax.tree_util.keystr(path) else 1)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    )
    got = plan._state_and_weight_bytes(cfg, mesh, state, [])
    assert got == 3 * 2 * want  # forward and backward, of two micro-batches


@pytest.mark.slow
def test_shares_are_what_a_real_state_takes(made):
    cfg, mesh, found, _ = made
    transform = make_transform(cfg)
    shapes = jax.eval_shape(lambda: init_state(cfg, transform))
    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)
    state = jax.device_put(zeros, sharding.state_shardings(mesh, shapes))
    assert sum(s.parameters for s in found.shares) == bytes_on_first_device(
        state.params
    )
    counters = sum(4 for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 0)
    assert sum(s.optimizer for s in found.shares) + counters == bytes_on_first_device(
        state.optimizer
    )
    # Four arrays of the batch, four bytes an element, and `go`.
    batch = 4 * 4 * cfg.train.batch_size * cfg.train.seq_len // mesh.size
    assert found.memory.arguments == bytes_on_first_device(state) + batch + 1
    experts = next(s for s in found.shares if s.name == "routed experts")
    E, F, L = 4, cfg.model.moe.expert_width, cfg.model.moe.latent_width
    assert experts.parameters == 3 * E * F * L * 4 // 4
    assert experts.optimizer == 2 * experts.parameters


@pytest.mark.slow
def test_a_cpu_has_no_roofline_and_the_plan_is_json(made):
    cfg, _, found, _ = made
    assert found.roofline is None and found.utilisation is None
    assert found.memory.fits is None and plan.advice(cfg, found) == []
    read = json.loads(json.dumps(plan.to_json(found)))
    assert read["devices"] == 4 and read["mesh"]["expert"] == 2
    assert read["memory"]["used"] == found.memory.used
    assert read["shares"][0]["name"] == "embedding"
    assert read["collectives"]["all-to-all"]["runs"] > 0
    tables = dict(plan.rows(cfg, found))
    memory = dict(tables["memory of a device"])
    assert memory["all"].endswith("limit unknown")
    kept = memory["- activations for the backward pass, at most"]
    assert kept == plan.size_text(found.parts.activations) and kept != "0.0 KiB"
    assert dict(tables["time"])["tokens a step"] == "128"


GIB = 2**30


def by_hand(**memory):
    """A plan of two parts for a device of 16 GiB."""
    sizes = {"arguments": 0, "temporaries": 0, "program": 0, "offloaded": 0}
    return plan.Plan(
        devices=4,
        device_kind="TPU v5 lite",
        mesh={"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 1},
        shares=[plan.Share("KDA", 10, 20), plan.Share("routed experts", 5, 10)],
        memory=plan.Memory(**sizes | memory, limit=16 * 2**30),
        parts=temporaries.Parts(2 * GIB, GIB),
        collectives={"all-reduce": hlo.Collective(3, 10, 20, False)},
        flops=1e15,
        roofline=plan.Roofline(2.0, 0.5, 1.0),
        utilisation=0.5,
        lower_seconds=1.0,
        compile_seconds=2.0,
        host_memory=GIB,
    )


def test_a_plan_that_fits_needs_no_advice():
    made = by_hand(arguments=10 * GIB, temporaries=6 * GIB)
    assert made.memory.fits is True
    assert plan.advice(tiny.make(), made) == []


def test_too_much_state_asks_for_the_axis_that_splits_it():
    made = by_hand(arguments=20 * GIB)
    found = plan.advice(tiny.make(), made)
    assert found[0] == (
        "parameters and optimizer take 20.0 GiB: raise --config.mesh.fsdp above 2, or "
        "use a larger slice"
    )
    assert found[1] == "halve momenta: --config.optimizer.momentum_dtype=bfloat16"
    experts = made._replace(shares=[plan.Share("routed experts", 99, 99)])
    assert "--config.mesh.expert above 2" in plan.advice(tiny.make(), experts)[0]
    halved = tiny.make("optimizer.momentum_dtype=bfloat16")
    assert "momenta" not in " ".join(plan.advice(halved, made))


def test_too_many_temporaries_ask_for_less_at_a_time():
    made = by_hand(arguments=GIB, temporaries=20 * GIB)
    assert plan.advice(tiny.make("train.batch_size=16"), made) == [
        "one row a device at a time: --config.train.micro_batches=4",
        "keep less for the backward pass: --config.train.remat=nested",
    ]
    last = tiny.make("train.batch_size=4", "train.remat=nested")
    assert plan.advice(last, made) == [
        "split time: raise --config.mesh.context above 1"
    ]


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 16])
def test_the_micro_batches_that_advice_names_are_legal(micro_batches):
    made = by_hand(temporaries=20 * GIB)
    sizes = made.mesh
    cfg = tiny.make("train.batch_size=64", f"train.micro_batches={micro_batches}")
    words = plan.advice(cfg, made)[0]
    if micro_batches == 16:
        assert "micro_batches" not in words
        return
    more = int(words.rpartition("=")[2])
    assert more == 16
    cfg = dataclasses.replace(
        cfg, train=dataclasses.replace(cfg.train, micro_batches=more)
    )
    assert not sharding.misfits(cfg, sizes)


def test_parts_of_the_temporaries_add_up_to_them():
    tables = dict(plan.rows(tiny.make(), by_hand(temporaries=7 * GIB)))
    assert tables["memory of a device"][1:5] == [
        ("temporaries", "7.0 GiB"),
        ("- activations for the backward pass, at most", "2.0 GiB"),
        ("- gradients, summed over micro-batches", "1.0 GiB"),
        ("- work in progress: the rest", "4.0 GiB"),
    ]
    tables = dict(plan.rows(tiny.make(), by_hand(temporaries=2 * GIB)))
    assert tables["memory of a device"][4][1].startswith("none left")


def test_the_bound_of_a_roofline_is_its_longest_part():
    made = by_hand(arguments=20 * GIB)
    assert (made.roofline.bound, made.roofline.seconds) == ("arithmetic", 2.0)
    assert plan.Roofline(1.0, 1.5, 1.2).bound == "memory"
    tables = dict(plan.rows(tiny.make(), made))
    memory = dict(tables["memory of a device"])
    assert memory["all"] == "20.0 GiB of 16.0 GiB: DOES NOT FIT"
    assert tables["collectives"][1] == ("all-reduce", "at least 3", "0.0 KiB")
    assert tables["time"][-1][1] == (
        "2.00 s, bound by arithmetic; 50% of peak, 64 tokens/s"
    )


def aot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.aot", *arguments],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )


SMALL = (
    "--config=configs/quickstart.py",
    "--config.model.num_layers=1",
    "--config.model.attention=('gqa',)",
    "--config.model.residual.kind=none",
    "--config.optimizer.kind=adamw",
    "--config.mesh.data=1",
)


@pytest.mark.slow
def test_the_command_plans_for_this_machine(tmp_path):
    file = tmp_path / "plan.json"
    done = aot(*SMALL, "--config.mesh.fsdp=-1", f"--json={file}")
    assert done.returncode == 0, done.stderr
    assert "quickstart on fsdp=8: 8 x cpu" in done.stdout
    assert "limit unknown" in done.stdout
    read = json.loads(file.read_text())
    assert read["topology"] == "" and read["mesh"]["fsdp"] == 8


def test_the_command_refuses_in_one_message():
    done = aot(*SMALL, "--topology=v9:2x2")
    assert done.returncode == 1
    assert "write GENERATION:SHAPE" in done.stderr and "Traceback" not in done.stderr


def test_the_command_asks_for_a_config_that_can_learn_from_rewards():
    done = aot(*SMALL, "--program=rl")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "quickstart has no rl section; use" in done.stderr


def test_the_command_says_how_to_get_the_compiler():
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    done = aot(*SMALL, "--topology=v5e:2x2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert "pip install -e .[tpu]" in done.stderr
