"""Plans for slices that are not here."""

from kimi_jax import hardware, plan, sharding, topology
from kimi_jax.infer import plan as infer_plan
from tests import tiny


def test_a_plan_for_a_slice_that_is_not_here():
    cfg = tiny.make(*tiny.QUICK)
    mesh = sharding.make_mesh(cfg, topology.devices("v5e:2x2"))
    found = plan.make_plan(cfg, mesh)
    assert found.device_kind == "TPU v5 lite" and found.devices == 4
    assert found.memory.limit == hardware.TPU_V5E.memory
    assert found.memory.fits is True
    assert found.roofline is not None and 0 < found.utilisation < 1
    assert "all-to-all" in found.collectives


def test_what_the_compiler_refuses_is_a_plan_with_advice():
    cfg = tiny.make(*tiny.QUICK, "train.batch_size=4096", "train.seq_len=8192")
    mesh = sharding.make_mesh(cfg, topology.devices("v5e:2x2"))
    found = plan.make_plan(cfg, mesh)
    assert found.memory.fits is False and found.collectives is None
    # The compiler keeps a little for itself.
    assert 15 * 2**30 < found.memory.limit < hardware.TPU_V5E.memory
    assert "--config.train.micro_batches=1024" in plan.advice(cfg, found)[0]
    assert "DOES NOT FIT" in str(plan.rows(cfg, found))
    assert plan.to_json(found)["collectives"] is None


def test_a_cache_that_does_not_fit_is_a_plan_too():
    cfg = tiny.make("model.num_layers=1", "model.attention=gqa")
    mesh = sharding.make_mesh(cfg, topology.devices("v5e:2x2")[:1])
    sizes = {"slots": 64, "length": 2**22, "chunk": 256}
    found = infer_plan.make_plan(cfg, mesh, "decode", **sizes)
    assert found.memory.fits is False and found.collectives is None
    assert "DOES NOT FIT" in str(infer_plan.rows(found))
    assert infer_plan.to_json(found)["memory"]["fits"] is False
