"""Root mean squares by component."""

import jax
import numpy as np

from kimi_jax import canonical
from kimi_jax.train.groups import head_spread, rms_by_group
from tests import tiny


def test_groups_are_those_of_the_parameters():
    model = tiny.make("model.num_layers=3", "model.attention=kda,mla,gqa").model
    params = tiny.variables(model)["params"]
    got = jax.jit(rms_by_group, static_argnums=1)(params, "gradient_rms")
    flat = canonical.flatten(model, jax.tree.map(np.array, params))

    def rms(*parts):
        chosen = [np.ravel(x) for k, x in flat.items() if any(p in k for p in parts)]
        return np.sqrt(np.mean(np.square(np.concatenate(chosen))))

    want = {
        "embedding": rms("/embed"),
        "kda": rms("/kda/"),
        "mla": rms("/mla/"),
        "gqa": rms("/gqa/"),
        "dense_ffn": rms("/mlp/"),
        "routed_experts": rms("/experts_"),
        "shared_experts": rms("/shared/"),
        "latent_projections": rms("/latent_"),
        "router": rms("/router"),
        "attention_residuals": rms("/residual/"),
        "norms": rms("attention/norm", "ffn/norm", "output/norm"),
        "output_head": rms("/unembed"),
    }
    assert got.keys() == {f"gradient_rms/{name}" for name in want}
    for name, value in want.items():
        np.testing.assert_allclose(got[f"gradient_rms/{name}"], value, rtol=1e-5)
    again = jax.eval_shape(lambda x: rms_by_group(x, "gradient_rms"), flat)
    assert again.keys() == got.keys()


def test_heads_that_are_updated_alike_have_a_spread_of_one():
    rng = np.random.default_rng(0)
    tree = {
        "layer_000/attention/kda/q": rng.choice([-2.0, 2.0], (3, 4, 5)),
        "layer_001/attention/mla/kv_b": np.stack(
            [np.full((3, 5), size) for size in (3.0, 4.0)], axis=1
        ),
        "layer_001/attention/mla/q_b": np.ones((3, 2, 5)),
        "layer_001/attention/mla/kv_a": rng.normal(size=(3, 7)),
    }
    got = head_spread(jax.tree.map(jax.numpy.asarray, tree), "spread")
    assert got.keys() == {"spread/kda", "spread/mla"}
    np.testing.assert_allclose(got["spread/kda"], 1.0, rtol=1e-6)
    # 4 over sqrt((9 + 16) / 2), and 1 of the other matrix.
    np.testing.assert_allclose(got["spread/mla"], (4 / 12.5**0.5 + 1) / 2, rtol=1e-6)
    nothing = head_spread({"a/kda/q": jax.numpy.zeros((3, 2, 5))}, "spread")
    assert nothing["spread/kda"] == 0
