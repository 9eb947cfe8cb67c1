"""The model without scans or a bank: a plain loop over layers, for comparison.

It applies the same attention and FFN modules to canonical parameters, but writes the
residual schemes out by their definition: lists of sources that grow. Only single
layers are compiled, once a kind.
"""

import functools

import jax
import jax.numpy as jnp
from flax import traverse_util

from kimi_jax import canonical, layout
from kimi_jax.modules.mlp import MLP
from kimi_jax.modules.moe import LatentMoE
from kimi_jax.modules.sublayer import ATTENTION


def forward(model, variables, tokens_BT, segment_ids_BT=None):
    """Final hidden states [B, T, D]."""
    nested = {
        name: traverse_util.unflatten_dict(canonical.flatten(model, tree), sep="/")
        for name, tree in variables.items()
    }
    params, balance = nested["params"], nested.get("balance", {})
    size = layout.block_sublayers(model)
    scheme = model.residual.kind
    sources, partial = [], params["embedding"]["embed"][tokens_BT]
    block_input = partial
    for s, kind in enumerate(layout.sublayer_kinds(model)):
        layer, part = f"layer_{s // 2:03d}", ("attention", "ffn")[s % 2]
        own = params[layer][part]
        if s % size == 0 and scheme == "block_attention":
            sources, partial = [*sources, partial], None
        if s % size == 0 and scheme == "additive":
            weight = params[f"block_{s // size:03d}"]["start"]["weight"]
            partial = partial + weight * (partial - block_input)
            block_input = partial
        h = read(model, own, sources, partial)
        x = rms_norm(h, own["norm"], model.norm_eps)
        state = balance.get(layer, {}).get(part, {}).get(kind)
        own = {"params": own[kind]} | ({"balance": state} if state else {})
        y = apply(model, kind, own, x, segment_ids_BT)
        partial = y if partial is None else partial + y
    h = read(model, params["output"], sources, partial)
    return rms_norm(h, params["output"]["norm"], model.norm_eps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def apply(model, kind, variables, x, segment_ids_BT):
    if kind == "mlp":
        return MLP(model, model.ffn.width).apply(variables, x)
    module = LatentMoE if kind == "moe" else ATTENTION[kind]
    return module(model).apply(variables, x, segment_ids_BT)


def read(model, own, sources, partial):
    if model.residual.kind != "block_attention":
        return partial
    values = jnp.stack(sources if partial is None else [*sources, partial])
    keys = rms_norm(values, own["residual"]["gain"], model.norm_eps)
    weights = jax.nn.softmax(keys @ own["residual"]["query"], axis=0)
    return jnp.sum(weights[..., None] * values, axis=0)


def rms_norm(x, gain, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * gain
