"""The vision tower equals its definition in numpy and the released code's values."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import canonical
from kimi_jax.modules import transformer, vision
from tests import tiny
from tests.modules import vision_reference as reference
from tests.modules.vision_cases import GRIDS, draw, make, media


@pytest.fixture(scope="module")
def model():
    return make().model


@pytest.fixture(scope="module")
def features(model):
    variables = tiny.variables(model)
    return jax.jit(lambda shown: vision.features(model, variables, shown))


def test_equals_the_numpy_definition(model, features):
    pixels, params = draw(0), tiny.variables(model)["params"]["vision"]
    merged = reference.encode(model.vision, params, pixels, GRIDS)
    want = reference.project(model.vision, params, merged)
    got = features(media([(pixels, GRIDS), (pixels, GRIDS)]))
    np.testing.assert_allclose(got[0, : len(want)], want, rtol=0, atol=2e-5)


def test_an_item_does_not_feel_its_neighbours(features):
    pixels, other = draw(0), draw(1)
    mixed = np.concatenate([other[:8], pixels[8:]])
    both = features(media([(pixels, GRIDS), (mixed, GRIDS)]))
    alone = features(media([(pixels[8:], GRIDS[1:]), (other, GRIDS)]))
    chex.assert_trees_all_equal(both[0, 2:4], both[1, 2:4])
    assert float(jnp.abs(both[0, :2] - both[1, :2]).max()) > 0.1
    # Other tiles, so other sums.
    np.testing.assert_allclose(alone[0, :2], both[0, 2:4], atol=2e-6)


def test_padding_is_inert(features):
    shown = media([(draw(0), GRIDS), (draw(1), GRIDS)])
    dirty = shown._replace(patches_BPC=shown.patches_BPC.at[:, 32:].set(7.0))
    chex.assert_trees_all_equal(features(shown)[:, :4], features(dirty)[:, :4])


def test_remat_changes_nothing(model):
    variables, shown = tiny.variables(model), media([(draw(0), GRIDS)])

    def loss(params, remat):
        own = {"params": {"vision": params}}
        return jnp.sum(jnp.sin(vision.features(model, own, shown, remat=remat)[:, :4]))

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = (grad(variables["params"]["vision"], r) for r in ("none", "block"))
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-6)
    assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves(plain))


def test_features_take_the_place_of_placeholders(model):
    """The text model sees the features, and nothing of the token that stood there."""
    variables = tiny.variables(model)
    tokens = np.array([[1, 259, 259, 2, 259, 3]], np.int32)
    shown = jnp.asarray(np.random.default_rng(3).normal(size=(1, 4, 16)), jnp.float32)

    def h(tokens, features_BMD=None, variables=variables):
        return transformer.apply(
            model, variables, tokens, features_BMD=features_BMD
        ).h_BTD

    table_VD = variables["params"]["embedding"]["embed"].at[9:12].set(shown[0, :3])
    own = {**variables["params"], "embedding": {"embed": table_VD}}
    as_tokens = np.array([[1, 9, 10, 2, 11, 3]], np.int32)
    want = h(as_tokens, variables={**variables, "params": own})
    np.testing.assert_allclose(h(tokens, shown), want, atol=1e-6)


def test_layers_have_names_of_their_own(model):
    params = tiny.variables(model)["params"]
    flat = canonical.flatten(model, {"params": params})
    assert flat["params/vision/layer_001/qkv"].shape == (16, 3, 2, 8)
    assert "params/vision/merge/norm" in flat
    back = canonical.unflatten(model, flat, {"params": params})
    chex.assert_trees_all_equal(back, {"params": params})


def test_a_text_model_has_no_tower_and_says_so():
    model = tiny.make().model
    with pytest.raises(ValueError, match=r"config.model.vision is none"):
        vision.features(model, {"params": {"vision": {}}}, media([(draw(0), GRIDS)]))


def test_first_values_have_the_published_spread():
    own = jax.jit(vision.init, static_argnums=0)(
        make("model.vision.width=64", "model.vision.mlp_width=512").model,
        jax.random.key(0),
    )
    spread = lambda x: float(np.std(x))  # noqa: E731
    assert spread(own["layers"]["up"]) == pytest.approx((2 / 64) ** 0.5, rel=0.02)
    assert spread(own["layers"]["down"]) == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    assert spread(own["embedding"]["position"]) == pytest.approx(1.0, rel=0.1)
    assert spread(own["layers"]["qkv"]) == pytest.approx((64 * 3) ** -0.5, rel=0.02)
    layers = own["layers"]["qkv"]
    assert not bool((layers[0] == layers[1]).any())
