"""The benchmark of several GPUs, on simulated devices of the smallest sizes."""

import runpy
import threading

import pytest

from experiments import bench_multi_gpu, multi_gpu_checks, multi_gpu_step
from experiments.multi_gpu_turns import Turns
from kimi_jax.errors import UserError


def config(**changes):
    made = runpy.run_path("configs/bench_multi_gpu.py")["get_config"]("tiny")
    for name, value in changes.items():
        made[name] = value  # `update` would keep other meshes
    return made


def test_unknown_parts_are_named():
    with pytest.raises(UserError, match=r"parts=\['link'\] do not exist; choose of"):
        bench_multi_gpu.run(config(parts=("link",)))


def test_a_mesh_that_needs_more_devices_says_so():
    assert multi_gpu_checks.sizes_of("fsdp=2,context=-1") == {"fsdp": 2, "context": -1}
    assert multi_gpu_checks.too_small("fsdp=2,context=-1", 4) is None
    why = multi_gpu_checks.too_small("fsdp=2,context=-1", 2)
    assert why == "not run: needs 4 devices"
    assert multi_gpu_checks.too_small("fsdp=16", 8) == "not run: needs 16 devices"


def test_a_share_of_collectives_is_hidden(capsys):
    events = [
        ("ncclDevKernel_AllGather", (0.0, 10.0)),
        ("gemm", (4.0, 7.0)),
        ("fusion", (6.0, 8.0)),
        ("ncclDevKernel_ReduceScatter", (20.0, 30.0)),
        ("gemm", (25.0, 40.0)),
    ]
    found = multi_gpu_step.overlap(events)
    assert found["collectives ms"] == pytest.approx(20e-6)
    assert found["hidden"] == pytest.approx((4 + 5) / 20)
    assert "gemm" in capsys.readouterr().out
    assert multi_gpu_step.overlap([("gemm", (0.0, 1.0))]) == {}


def test_one_measures_when_no_other_compiles(tmp_path):
    path = str(tmp_path / "turns")
    first, second = Turns(path), Turns(path)
    first.together()
    second.together()
    waiting = threading.Thread(target=second.alone)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    first._file.close()  # as when its process ends
    waiting.join(10)
    assert not waiting.is_alive()
    Turns("").alone()


@pytest.mark.slow
def test_rows_of_links_experts_and_dispatch():
    """Raises if a check fails."""
    parts = "links", "dispatch", "experts"
    result = bench_multi_gpu.run(
        config(parts=parts, dispatch_experts=(32,), latents=(16,))
    )
    cases = [row["case"].split()[0] for row in result["rows"]]
    assert cases == [
        *("all_gather", "ppermute", "all_to_all", "psum"),
        *("32",) * 4,
        *("experts,",) * 4,
    ]
    assert all(row["ms"] > 0 for row in result["rows"] if "ms" in row)
    assert all(row["sent MB"] > 0 for row in result["rows"][-3::2])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["meshes", "step"])
def test_rows_of_whole_programs(part):
    one = {"meshes": ("fsdp=2,context=-1",), "step_meshes": {"fsdp=2": ("defaults",)}}
    result = bench_multi_gpu.run(config(parts=(part,), **one))
    assert len(result["rows"]) == {"meshes": 2, "step": 1}[part]


def test_errors_are_judged_after_all_are_seen():
    fine = {"error": 0.1, "limit": 0.2, "bias error": 0.3, "bias limit": 0.4}
    multi_gpu_checks.judge([fine, {"note": "not run"}])
    for bad in ({"error": float("nan")}, {"bias error": 0.5}):
        with pytest.raises(UserError, match="several devices differ from one"):
            multi_gpu_checks.judge([fine, fine | bad])
