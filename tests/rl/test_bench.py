"""The bench of the learner, at a size for tests."""

import pytest

from configs import bench_rl
from experiments import bench_rl as bench


@pytest.mark.slow
def test_pieces_compute_the_same_with_less_memory():
    config = bench_rl.get_config()
    config.update(
        length=1024,
        pieces=(64, 0),
        answer=24,
        turn=8,
        width=16,
        layers=1,
        attention=("mla",),
        heads=2,
        head_dim=8,
        ffn_width=32,
        dtype="float32",
        steps=1,
    )
    pieces, whole = bench.run(config)["rows"]
    assert (pieces["implementation"], whole["implementation"]) == (
        "pieces of 64",
        "whole rows",
    )
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert pieces["gradient norm"] == pytest.approx(whole["gradient norm"], rel=1e-5)
    assert pieces["temporary GB"] < 0.5 * whole["temporary GB"]
    assert min(pieces["ms"], pieces["score ms"], pieces["peak GB"]) > 0
