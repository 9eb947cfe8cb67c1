"""A slice of K3 at its published widths, compiled for TPUs that are not here.

A residual block of it: 12 layers, three times KDA, KDA, KDA, MLA, all with 896 experts.
On 512 chips each keeps as much as with all 93 layers on 4,096.
"""

import runpy

from kimi_jax import config_io, plan, sharding, topology

OVERRIDES = (
    "model.ffn.num_dense_layers=0",
    "train.batch_size=256",
    "mesh.fsdp=1",
)


def test_a_block_of_k3_fits():
    values = runpy.run_path("configs/k3.py")["get_config"]("layers=12")
    cfg = config_io.from_dict(values, OVERRIDES)
    mesh = sharding.make_mesh(cfg, topology.devices("v5p:8x8x8"))
    found = plan.make_plan(cfg, mesh)
    assert found.memory.fits, plan.rows(cfg, found)
    kept = sum(share.parameters for share in found.shares)
    assert kept / 4 < 1.3 * 12 / 93 * 2779.48e9 / 512
    assert found.collectives["all-to-all"].exact
    # Tokens to experts and back, forward and backward, in 12 layers and 4 passes; and
    # once more forward, as the backward pass computes it again.
    slots = 8192 * 16 * 1.25
    there_and_back = 2 * slots * 3584 * 2
    sent = 3 * 12 * 4 * there_and_back * 63 / 64
    assert found.collectives["all-to-all"].sent_bytes > sent
