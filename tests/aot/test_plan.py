"""Plans for slices that are not here."""

from configs import common
from kimi_jax import config_io, hardware, plan, sharding, topology
from kimi_jax.infer import plan as infer_plan
from kimi_jax.rl.program import lower_rl_step
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


def test_reinforcement_learning_on_a_million_tokens():
    """Whole rows over the context axis, experts replayed, every kind of layer."""
    values = tiny.values()
    values.rl = common.rl()
    values.rl.update(environments=("tools",), iterations=4, replay_routes=True)
    cfg = config_io.from_dict(
        values,
        [
            "model.num_layers=4",
            "model.attention=kda*3,mla",
            "model.mla.block_size=4096",
            "train.seq_len=1048576",
            "train.batch_size=2",
            "train.remat=unit",
            "train.loss_chunk=262144",
            "mesh.data=2",
            "mesh.context=4",
        ],
    )
    mesh = sharding.make_mesh(cfg, topology.devices("v5p:2x2x2"))
    found = plan.make_plan(cfg, mesh, lower=lower_rl_step)
    assert found.devices == 8 and found.mesh["context"] == 4
    assert found.memory.fits is True
    assert "collective-permute" in found.collectives
    # The state, and a row's 12 arrays of four bytes a token: routes are two a layer.
    rows = 4 * 2**18 * 12
    state = sum(share.parameters + share.optimizer for share in found.shares)
    assert state + rows < found.memory.arguments < 1.5 * (state + rows) + 2**20
