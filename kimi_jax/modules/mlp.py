"""Dense gated feed-forward layer, and the activation that every FFN shares."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from kimi_jax import config
from kimi_jax.modules import parameters
from kimi_jax.ops.activations import largest, situ, swiglu


def activation(ffn: config.FFN) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(gate, up) -> hidden, elementwise."""
    if ffn.activation == "swiglu":
        return swiglu
    return functools.partial(situ, beta=ffn.situ_beta, linear_beta=ffn.situ_linear_beta)


class MLP(nn.Module):
    """x_BTD -> y_BTD through `hidden` gated units.

    `segment_ids_BT` keeps padding out of the statistics and changes no output.
    """

    model: config.Model
    hidden: int

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        model, D, F = self.model, self.model.width, self.hidden

        def matrix(name: str, shape: tuple[int, ...]) -> jax.Array:
            return parameters.matrix(self, name, shape, model.init_std, model.dtype)

        gate_BTF = x_BTD @ matrix("gate", (D, F))
        up_BTF = x_BTD @ matrix("up", (D, F))
        hidden_BTF = activation(model.ffn)(gate_BTF, up_BTF)
        if parameters.observing(self):
            real_BT1 = None if segment_ids_BT is None else segment_ids_BT[..., None] > 0
            parameters.sow_stat(self, "hidden_max", largest(hidden_BTF, real_BT1))
        return hidden_BTF @ matrix("down", (F, D))
