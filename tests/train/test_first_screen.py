"""What a run says about its experts before the first step."""

import jax
import pytest

from kimi_jax import sharding
from kimi_jax.errors import UserError
from kimi_jax.modules import moe
from kimi_jax.train import first_screen
from tests import tiny


def rows(*overrides):
    cfg = tiny.make(*overrides)
    return dict(first_screen.expert_rows(cfg, sharding.make_mesh(cfg)))


def test_experts_and_why():
    assert rows() == {
        "experts": "blocked: drops nothing; 'ragged' is slow here: every row by every "
        "expert",
        "routing": "balanced by quantile",
    }
    assert rows("model.moe.implementation=ragged")["experts"] == (
        "ragged: asked for by name, but slow: every row by every expert; try 'blocked'"
    )
    split = rows("mesh.expert=2", "model.moe.balancing.method=sign")
    assert split["routing"] == (
        "balanced by sign; sent by capacity, with room for 1.25 times an even load"
    )


def test_a_model_without_experts_says_nothing():
    assert rows("model.ffn.num_dense_layers=6") == {}


@pytest.mark.parametrize("sizes", [(), ("mesh.expert=2", "mesh.context=2")])
def test_the_choice_is_that_of_the_layer(sizes, monkeypatch):
    """It asks for the same slots and experts as the layer does when it is traced."""
    asked = []
    choose = moe.dispatch_lib.choose
    monkeypatch.setattr(
        moe.dispatch_lib, "choose", lambda *a: asked.append(a) or choose(*a)
    )
    cfg = tiny.make("model.num_layers=2", "model.attention=gqa", *sizes)
    mesh, train = sharding.make_mesh(cfg), cfg.train
    first_screen.expert_rows(cfg, mesh)
    layer = moe.LatentMoE(cfg.model)
    x_BTD = jax.ShapeDtypeStruct(
        (train.batch_size, train.seq_len, cfg.model.width), "float32"
    )
    with jax.set_mesh(mesh):
        jax.eval_shape(
            lambda key, x: layer.init(key, x, None), jax.random.key(0), x_BTD
        )
    said, *traced = asked
    assert traced and set(traced) == {said}


def test_a_kernel_that_cannot_run_is_named_with_its_field(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    cfg = tiny.make("model.kda.implementation=triton")
    with pytest.raises(UserError, match=r"config\.model\.kda\.implementation: .*GPU"):
        first_screen.kda_kernel(cfg, sharding.make_mesh(cfg))
