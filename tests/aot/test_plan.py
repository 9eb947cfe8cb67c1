"""Plans for slices that are not here."""

from kimi_jax import hardware, plan, sharding, topology
from tests import tiny


def test_a_plan_for_a_slice_that_is_not_here():
    cfg = tiny.make(
        "model.num_layers=2",
        "model.attention=gqa",
        "model.residual.kind=none",
        "optimizer.kind=adamw",
        "mesh.fsdp=2",
        "mesh.expert=2",
    )
    mesh = sharding.make_mesh(cfg, topology.devices("v5e:2x2"))
    found = plan.make_plan(cfg, mesh)
    assert found.device_kind == "TPU v5 lite" and found.devices == 4
    assert found.memory.limit == hardware.TPU_V5E.memory
    assert found.memory.fits is True
    assert found.roofline is not None and 0 < found.utilisation < 1
    assert "all-to-all" in found.collectives
