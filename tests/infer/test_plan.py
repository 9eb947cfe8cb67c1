"""Decoding and reading can be planned for devices; shapes alone are made."""

import jax

from kimi_jax import sharding
from kimi_jax.infer import plan, program
from tests.infer import models


def test_decoding_is_planned_on_a_mesh():
    cfg = models.hybrid("mesh.context=2", "mesh.tensor=2")
    mesh = sharding.make_mesh(cfg, jax.devices()[:4])
    made = plan.make_plan(cfg, mesh, "decode", slots=2, length=1024, chunk=16)
    # Two layers of each kind; heads over two, pages over two.
    assert made.cache["states"] == 2 * 2 * 1 * 8 * 8 * 4
    assert made.cache["pages"] == 2 * 2 * 512 * (8 + 4) * 4
    assert made.memory.arguments >= sum(made.cache.values()) + made.weights
    # The cache is given and comes back in place.
    assert made.memory.temporaries < made.memory.arguments
    assert "all-reduce" in made.collectives
    titles = [title for title, _ in plan.rows(made)]
    assert titles[0] == "kept on a device" and plan.to_json(made)["slots"] == 2
    lowered = program.lower_read(cfg, mesh, 2, 1024, 16)
    assert "while" in lowered.as_text()
