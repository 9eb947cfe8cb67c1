"""Where a step first went bad: the layer, the parameter or the operation.

The step's batch is run once more in the order of the computation, until something is
not finite:

    1. the embedding, each sublayer by itself, the output and the loss
    2. within the first bad one: what it reads of its parameters, else its operations
    3. if the loss is fine, the gradients, from the output back to the embedding
    4. if they are fine too, it was the optimizer's update

A healthy step runs none of this. Sublayers of one kind share a small program; only the
third stage compiles the whole gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from kimi_jax import canonical, config, distributed, layout
from kimi_jax.modules import sublayer, transformer, vision
from kimi_jax.ops.vision import put_features
from kimi_jax.train.batch import Batch
from kimi_jax.train.first_bad_operation import first_bad_operation
from kimi_jax.train.step import State, count, make_loss, split, token_losses

_SHOWN = 6  # rows or parameters that a sentence names


class _Vision(NamedTuple):
    """The tower as a module: what images put in the place of tokens."""

    model: config.Model

    def apply(self, own: Any, x_BTD: Any, tokens_BT: Any, media: vision.Media) -> Any:
        variables = {"params": {"vision": own["params"]}}
        features_BMD = vision.features(self.model, variables, media)
        here_BT = vision.placeholders(self.model, tokens_BT)
        return put_features(x_BTD, here_BT, features_BMD)


class _Part(NamedTuple):
    """One piece of the forward pass, with what it is applied to."""

    name: str  # "embedding", "layer_003/ffn", "block_001/start", "vision" or "output"
    module: nn.Module | _Vision
    variables: Any
    inputs: tuple[Any, ...]


def explain(
    cfg: config.Config, state: State, batch: Batch, groups: Mapping[str, Any]
) -> str:
    """The first thing in the step of `batch` that is not finite, in words.

    Args:
      state: as it was before the step.
      batch: what the step saw.
      groups: of the step's metrics.
    """
    micro = split(batch, cfg.train.micro_batches)
    # An array over several processes can be indexed, but not iterated over.
    pieces = [
        jax.tree.map(lambda leaf, n=number: leaf[n], micro)
        for number in range(len(micro.tokens_BT))
    ]
    for number, piece in enumerate(pieces):
        rows = np.arange(len(piece.tokens_BT)) * len(pieces) + number
        found = _in_forward(cfg, state, piece, rows)
        if found is not None:
            return found
    found = _in_gradients(cfg, state, batch, pieces) or _in_update(groups)
    return found or (
        "nothing that can be found again: run by themselves, all layers and gradients "
        "of this batch are finite; it takes this rounding or this hardware"
    )


def _in_forward(
    cfg: config.Config, state: State, batch: Batch, rows: np.ndarray
) -> str | None:
    variables = {"params": state.params, "balance": state.balance}
    real_BT = distributed.whole(batch.segment_ids_BT) > 0
    h_BTD = unembed_DW = jnp.zeros(0)  # the walk ends with the output's
    for part, result in _forward(cfg.model, variables, batch):
        h_BTD, unembed_DW = result
        finite_BT = distributed.whole(jnp.all(jnp.isfinite(h_BTD), axis=-1))
        bad_BT = ~finite_BT & real_BT
        if bad_BT.any():
            tokens = np.unique(distributed.whole(batch.tokens_BT)[bad_BT])
            row, position = np.argwhere(bad_BT)[0]
            return (
                f"the forward pass of {part.name}: {_inside(part, tokens)}; "
                f"{bad_BT.sum()} tokens are bad, the first in row {rows[row]}, "
                f"position {position}"
            )
    out = transformer.Forward(h_BTD, unembed_DW, {})
    loss, _ = jax.jit(token_losses, static_argnums=0)(cfg, out, batch)
    return None if bool(jnp.isfinite(loss)) else f"the loss, {float(loss)}"


def _forward(
    model: config.Model, variables: Any, batch: Batch
) -> Iterator[tuple[_Part, tuple[Any, Any]]]:
    """Each part of the model and its (h_BTD, unembed_DW or None), in order."""
    ids_BT = batch.segment_ids_BT
    embedding = transformer.Embedding(model)
    own = _slice(variables, "embedding", ())
    part = _Part("embedding", embedding, own, (batch.tokens_BT,))
    x_BTD = _run(*part[1:])
    yield part, (x_BTD, None)
    if batch.media is not None:
        own = _slice(variables, "vision", ())
        shown = (x_BTD, batch.tokens_BT, batch.media)
        part = _Part("vision", _Vision(model), own, shown)
        x_BTD = _run(*part[1:])
        yield part, (x_BTD, None)
    stream = sublayer.start_stream(model, layout.num_blocks(model), x_BTD)
    for place in layout.places(layout.plan(model)):
        module: nn.Module = sublayer.BlockStart(model)
        inputs: tuple[Any, ...] = (stream,)
        if place.kind != "start":
            module, inputs = sublayer.Sublayer(model, place.kind), (stream, ids_BT)
        own = _slice(variables, place.path, place.at)
        part = _Part(place.name, module, own, inputs)
        stream = _run(*part[1:])
        yield part, (stream.partial_BTD, None)
    own = _slice(variables, "output", ())
    part = _Part("output", transformer.Output(model), own, (stream, ids_BT))
    yield part, _run(*part[1:])


@functools.partial(jax.jit, static_argnums=0)
def _run(module: nn.Module | _Vision, variables: Any, inputs: tuple[Any, ...]) -> Any:
    return module.apply(variables, *inputs)


def _slice(variables: Any, path: str, at: tuple[int, ...]) -> Any:
    """The variables of one part out of the stacked tree."""
    own = {}
    for collection, tree in variables.items():
        for key in path.split("/"):
            tree = tree.get(key, {})
        own[collection] = jax.tree.map(lambda x: x[at], tree)
    return own


def _inside(part: _Part, tokens: np.ndarray) -> str:
    """What is bad about a part whose inputs are fine."""
    if part.name == "embedding":
        return f"the rows of tokens {_some(tokens)} in 'embed' are not finite"
    bad = _not_finite(part.variables)
    if bad:
        return f"not finite are its parameters {_some(bad)}"
    operation = first_bad_operation(
        lambda variables, inputs: part.module.apply(variables, *inputs),
        part.variables,
        part.inputs,
    )
    return f"first bad is {operation}" if operation else "no single operation is bad"


def _in_gradients(
    cfg: config.Config, state: State, batch: Batch, pieces: Sequence[Batch]
) -> str | None:
    """The first bad gradient on the way back, or None."""
    grad = jax.jit(jax.grad(make_loss(cfg), has_aux=True))
    totals = count(batch)
    places = [place.name for place in layout.places(layout.plan(cfg.model))]
    for piece in pieces:
        grads, _ = grad(state.params, state.balance, piece, totals)
        bad = _not_finite(canonical.flatten(cfg.model, grads))
        for part in ("output", *reversed(places), "embedding", "vision"):
            own = [name for name in bad if name.startswith(part + "/")]
            if own:
                return (
                    f"the backward pass, where {part} comes first: not finite are the "
                    f"gradients of {_some(own)}"
                )
    return None


def _in_update(groups: Mapping[str, Any]) -> str | None:
    bad = [
        name.removeprefix("update_rms/")
        for name, rms in groups.items()
        if name.startswith("update_rms/") and not np.isfinite(rms)
    ]
    if not bad:
        return None
    return f"the optimizer's update of {_some(bad)}; all gradients are finite"


def _not_finite(tree: Any) -> list[str]:
    return [
        canonical.path_name(path).removeprefix("params/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not bool(jnp.all(jnp.isfinite(leaf)))
    ]


def _some(items: Any) -> str:
    shown = [str(item) for item in items[:_SHOWN]]
    return ", ".join(shown + ["..."] * (len(items) > _SHOWN))
