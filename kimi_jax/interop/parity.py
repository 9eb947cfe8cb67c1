"""Do we compute what the released code computes?

`compare` takes our logits and those of a file that was made with the released code;
`hidden_states` walks the layers one by one, so that a deviation has a place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kimi_jax import canonical, config, layout
from kimi_jax.data.media import expand
from kimi_jax.interop.entries import InteropError
from kimi_jax.modules import transformer, vision
from kimi_jax.modules.sublayer import BlockStart, Stream, Sublayer, start_stream


class Parity(NamedTuple):
    """How far logits [..., W] are from the expected ones.

    max_abs_err, mean_abs_err: of the logits.
    kl: mean over positions of KL(expected || ours), nats.
    top1: share of positions whose likeliest token is the same.
    """

    max_abs_err: float
    mean_abs_err: float
    kl: float
    top1: float

    def line(self) -> str:
        return " ".join(f"{name}={value:.3g}" for name, value in self._asdict().items())


def compare(ours: np.ndarray, expected: np.ndarray) -> Parity:
    """Differences in float64; a value that is not finite makes them infinite.

    Raises:
      InteropError: the shapes differ.
    """
    if ours.shape != expected.shape:
        raise InteropError(
            f"logits {list(ours.shape)}, expected {list(expected.shape)}; the file is "
            "of another checkpoint"
        )
    a, b = ours.astype(np.float64), expected.astype(np.float64)
    error = np.abs(a - b)
    log_p, log_q = _log_softmax(b), _log_softmax(a)
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    found = Parity(
        float(error.max()),
        float(error.mean()),
        max(float(kl.mean()), 0.0),
        float(np.mean(a.argmax(-1) == b.argmax(-1))),
    )
    if not np.isfinite(error).all():
        return found._replace(max_abs_err=np.inf, mean_abs_err=np.inf, kl=np.inf)
    return found


def read_expected(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of an `expected.npz`: input_ids [B, T], logits [B, T, W], and for text
    models hidden_i [B, T, D], the running residual after layer i. Files with images
    have pixel_values and grid_thws too, and a placeholder for each image.

    Raises:
      InteropError: no such file, or it lacks one of the first two.
    """
    try:
        with np.load(file) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileNotFoundError as error:
        raise InteropError(
            f"{file} does not exist; it holds the input and the logits of the released "
            "code (docs/interop.md), and --expected=FILE names another one"
        ) from error
    except (OSError, ValueError) as error:
        raise InteropError(f"{file} is no npz file: {error}") from error
    for name in ("input_ids", "logits"):
        if name not in arrays:
            raise InteropError(f"{file} has no {name}; it has {', '.join(arrays)}")
    return arrays


def shown(
    model: config.Model, expected: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, vision.Media | None]:
    """The tokens [B, T] of a file, its placeholders expanded, and what they show.

    Raises:
      InteropError: the file has images and the model no tower, or placeholders and
        images do not match.
    """
    tokens_BT = expected["input_ids"]
    if "pixel_values" not in expected:
        return tokens_BT, None
    if model.vision is None or len(tokens_BT) != 1:
        raise InteropError(
            "the expected values are of one row with images, which takes a checkpoint "
            f"with a vision_config; there are {len(tokens_BT)} rows"
        )
    pixels, grids_I3 = expected["pixel_values"], expected["grid_thws"]
    placeholder, merge = model.vision.placeholder, model.vision.merge
    tokens_T = expand(tokens_BT[0], grids_I3, placeholder, merge)
    patches_BPC = jnp.asarray(pixels.reshape(1, len(pixels), -1), jnp.float32)
    media = vision.Media(patches_BPC, jnp.asarray(grids_I3, jnp.int32)[None])
    return tokens_T[None], media


def logits(
    model: config.Model,
    variables: transformer.Variables,
    expected: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Next-token logits [B, T, W] of the production forward pass.

    Args:
      expected: from `read_expected`; its inputs are used.

    Raises:
      InteropError: see `shown`.
    """
    tokens_BT, media = shown(model, expected)

    @jax.jit
    def forward(variables: transformer.Variables, tokens_BT: jax.Array) -> jax.Array:
        features_BMD = None
        if media is not None:
            features_BMD = vision.features(model, variables, media)
        out = transformer.apply(model, variables, tokens_BT, features_BMD=features_BMD)
        return transformer.logits(out.h_BTD, out.unembed_DW)

    return np.asarray(forward(variables, tokens_BT))


def hidden_states(
    model: config.Model, variables: transformer.Variables, tokens_BT: np.ndarray
) -> Iterator[np.ndarray]:
    """The running residual [B, T, D] after each layer: with attention residuals, the
    running sum of the layer's block."""
    own: dict[str, Any] = {}
    for collection, tree in variables.items():
        for name, leaf in canonical.flatten(model, tree).items():
            layer, _, rest = name.partition("/")
            part, _, leaf_name = rest.partition("/")
            place = own.setdefault(f"{layer}/{part}", {}).setdefault(collection, {})
            place[tuple(leaf_name.split("/"))] = leaf
    nested = {
        place: {c: traverse_util.unflatten_dict(flat) for c, flat in found.items()}
        for place, found in own.items()
    }
    embed = nested["embedding/embed"]["params"][""]
    x_BTD = embed.astype(model.dtype)[tokens_BT]
    stream = start_stream(model, layout.num_blocks(model), x_BTD)
    for place in layout.places(layout.plan(model)):
        stream = _step(model, place.kind, nested.get(place.name, {}), stream)
        if place.name.endswith("/ffn"):
            yield np.asarray(stream.partial_BTD)


def first_deviation(
    model: config.Model,
    variables: transformer.Variables,
    expected: Mapping[str, np.ndarray],
    atol: float,
) -> tuple[int | None, dict[int, float]]:
    """The first layer that is off by more than `atol` of its scale, and all errors.

    Layers that `expected` has no hidden_i of are not looked at. The scale is the
    largest expected value of the layer, or 1 if that is more.
    """
    first: int | None = None
    errors: dict[int, float] = {}
    last = max(
        (i for i in range(model.num_layers) if f"hidden_{i}" in expected), default=-1
    )
    states = hidden_states(model, variables, expected["input_ids"])
    for i, ours in zip(range(last + 1), states, strict=False):
        if f"hidden_{i}" not in expected:
            continue
        theirs = expected[f"hidden_{i}"].astype(np.float64)
        errors[i] = float(np.abs(ours.astype(np.float64) - theirs).max())
        scale = max(1.0, float(np.abs(theirs).max()))
        if first is None and not errors[i] <= atol * scale:
            first = i
    return first, errors


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(
    model: config.Model, kind: str, variables: transformer.Variables, stream: Stream
) -> Stream:
    if kind == "start":
        made: Any = BlockStart(model).apply(variables, stream)
    else:
        made = Sublayer(model, kind).apply(variables, stream, None)
    return made


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
