"""The bench of KDA in small: every case of its configs, and what residuals weigh."""

import pytest

from configs import bench_kda as gpu
from configs import bench_kda_tpu as tpu
from experiments import bench_kda

SHAPE = (1, 96, 2)


@pytest.mark.slow
@pytest.mark.parametrize("file", [gpu, tpu], ids=["gpu", "tpu"])
def test_rows_of_one_shape(file):
    config = file.get_config()
    config.packed_shape = config.residuals_shape = SHAPE
    config.update(width=16, packed=(30, 60, 6), calls=1, rounds=1)
    rows = {
        row["case"].split(" (")[0]: row for row in bench_kda.timed("xla", SHAPE, config)
    }
    both = "forward+backward"
    kept = [rows[f"{both}, keeping {n},"]["kept GB"] for n in ("all", "states", "none")]
    assert kept[0] > 2 * kept[1] > 2 * kept[2]
    packed = {"forward, packed,", f"{both}, packed,"}
    assert packed | {"forward", both} < set(rows) and len(rows) == 7
    assert all(row["ms"] > 0 for row in rows.values())


def test_rows_of_each_kernel():
    pytest.importorskip("triton")
    config = gpu.get_config()
    config.update(width=16, calls=1, rounds=1)
    rows = list(bench_kda.kernels((1, 40, 1), config))
    names = [row["case"].split(" alone")[0] for row in rows]
    kinds = ["intra", "scan", "scan, keeping states,", "reverse", "pairs", "grads"]
    assert names == kinds and all(row["ms"] > 0 for row in rows)
