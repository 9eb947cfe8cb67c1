"""Root mean squares by component."""

import jax
import numpy as np

from kimi_jax import canonical
from kimi_jax.train.groups import rms_by_group
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
