"""Folding layers into scans loses nothing, and names do not depend on it."""

import chex
import jax.numpy as jnp
import pytest

from configs import k3
from kimi_jax import canonical, config_io, layout
from tests import tiny


@pytest.mark.parametrize("block_size", [0.5, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("pattern", ["kda*3,mla", "kda", "mla,kda*4,mla"])
def test_places_visit_every_sublayer_once_in_order(pattern, block_size):
    model = tiny.make(
        f"model.attention={pattern}", f"model.residual.block_size={block_size}"
    ).model
    stages = layout.plan(model)
    places = [p for p in layout.places(stages) if p.kind != "start"]
    assert tuple(p.kind for p in places) == layout.sublayer_kinds(model)
    assert [p.name for p in places] == [
        f"layer_{i:03d}/{part}" for i in range(6) for part in ("attention", "ffn")
    ]
    assert len({(p.path, p.at) for p in places}) == len(places)
    starts = [p for p in layout.places(stages) if p.kind == "start"]
    assert len(starts) == layout.num_blocks(model)


def test_k3_folds_into_sixteen_layer_bodies():
    model = config_io.from_dict(k3.get_config()).model
    stages = layout.plan(model)
    bodies = [run.unit for s in stages for block in s.blocks for run in block]
    assert sum(map(len, bodies)) == 2 * 16
    assert [stage.repeats for stage in stages] == [1, 6, 1]
    assert layout.num_blocks(model) == 8
    kinds = layout.sublayer_kinds(model)[::2]
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "mla"] == [
        *range(4, 93, 4),
        93,
    ]


@pytest.mark.parametrize("kind", ["block_attention", "additive", "none"])
def test_canonical_names_round_trip(kind):
    model = tiny.make(f"model.residual.kind={kind}").model
    params, balance = (tiny.variables(model)[k] for k in ("params", "balance"))
    for tree in (params, {"optimizer": ({"mu": params},), "balance": balance}):
        flat = canonical.flatten(model, tree)
        assert not any("stage" in name for name in flat)
        restored = canonical.unflatten(model, flat, tree)
        chex.assert_trees_all_equal(restored, tree)


def test_canonical_names_are_those_of_the_layers():
    model = tiny.make().model
    params, balance = (tiny.variables(model)[k] for k in ("params", "balance"))
    flat = canonical.flatten(model, params)
    assert flat["layer_002/attention/mla/q_b"].shape == (8, 2, 12)
    assert flat["layer_000/ffn/mlp/up"].shape == (16, 32)
    assert sorted(canonical.flatten(model, balance)) == [
        f"layer_{i:03d}/ffn/moe/bias" for i in range(1, 6)
    ]


def test_mismatch_lists_the_names():
    model = tiny.make().model
    params = tiny.variables(model)["params"]
    flat = canonical.flatten(model, params)
    flat["extra"] = jnp.zeros(3)
    del flat["layer_003/ffn/norm"]
    flat["embedding/embed"] = flat["embedding/embed"][:, :4]
    with pytest.raises(ValueError, match="do not match") as caught:
        canonical.unflatten(model, flat, params)
    text = str(caught.value)
    assert "extra: not in the model" in text
    assert "layer_003/ffn/norm: missing" in text
    assert "embedding/embed: shape (272, 4), expected (272, 16)" in text
