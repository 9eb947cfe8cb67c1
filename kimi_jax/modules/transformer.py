"""The language model: embedding, sublayers in nested scans, output.

The modules of this folder own the parameters of one sublayer each; the depth is two
plain `lax.scan`s over stacked parameters (see `kimi_jax.layout`): over residual blocks
outside, over repeated units of layers inside. The inner scan closes over the bank of
finished blocks, so its carry is one activation.

`variables` holds "params", which are trained, and "balance", the routers' state.
`remat` says what the backward pass computes again:

    none     nothing
    unit     each unit of layers, from its input
    block    each residual block, from its input
    nested   both: one more forward pass, least memory
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from kimi_jax import layout, sharding
from kimi_jax.config import Model
from kimi_jax.modules import attend, moe, parameters, vision
from kimi_jax.modules.cache import (
    AXES,
    ENTRY,
    LEAVING,
    PAGES,
    STATES,
    Cache,
    Chunk,
    Segment,
)
from kimi_jax.modules.sublayer import (
    BlockStart,
    ReadResidual,
    Stream,
    Sublayer,
    start_stream,
)
from kimi_jax.ops.norms import rms_norm
from kimi_jax.ops.paged_attention import Where
from kimi_jax.ops.vision import put_features

Variables = dict[str, Any]


class Forward(NamedTuple):
    """What the model returns.

    It stops before the logits, which are too large to exist whole at long T: the loss
    takes the final hidden states and the output matrix, and `logits` multiplies them
    for the few positions where logits are wanted.
    """

    h_BTD: jax.Array
    unembed_DW: jax.Array
    stats: dict[str, Any]  # monitoring values, stacked as the parameters are


class Embedding(nn.Module):
    """tokens_BT -> x_BTD."""

    model: Model

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        shape = (self.model.vocab_size, self.model.width)
        std, dtype = self.model.init_std, self.model.dtype
        embed_WD = parameters.matrix(self, "embed", shape, std, dtype)
        # Whole rows: with rows in parts, XLA would send all tokens to every device.
        return sharding.constrain(embed_WD, "vocab", None)[tokens_BT]


class Output(nn.Module):
    """Stream -> (h_BTD, unembed_DW): the last mixture over depth, and a norm."""

    model: Model

    @nn.compact
    def __call__(
        self, stream: Stream, segment_ids_BT: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        model = self.model
        h_BTD = ReadResidual(model, name="residual")(stream, segment_ids_BT)
        gain_D = parameters.gain(self, "norm", model.width)
        shape = (model.width, model.vocab_size)
        unembed_DW = parameters.matrix(
            self, "unembed", shape, model.init_std, model.dtype
        )
        # Gathered once, and not again for every chunk of the loss.
        unembed_DW = sharding.constrain(unembed_DW, None, "vocab")
        return rms_norm(h_BTD, gain_D, model.norm_eps), unembed_DW


def init(model: Model, key: jax.Array) -> Variables:
    """Fresh variables. Call it under `jax.jit`, which drops the layers' own work.

    Every sublayer draws from a key of its own, so first values do not depend on how
    layers fold into scans.
    """
    stream = start_stream(model, 1, jnp.zeros((1, 1, model.width), model.dtype))
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    variables: Variables = {"params": {}, "balance": {}}
    # Keys of layers count up from zero, those of the ends down from 2^32.
    last, before = (jax.random.fold_in(key, 2**32 - i) for i in (1, 2))
    _store(variables, "embedding", _init(Embedding(model), last, tokens_BT))
    _store(variables, "output", _init(Output(model), before, stream, None))
    if model.vision is not None:
        own = vision.init(model, jax.random.fold_in(key, 2**32 - 3))
        variables["params"]["vision"] = own
    groups: dict[str, list[layout.Place]] = {}
    for place in layout.places(layout.plan(model)):
        groups.setdefault(place.kind, []).append(place)
    for kind, places in groups.items():
        keys = jnp.stack([jax.random.fold_in(key, place.number) for place in places])

        def draw(key: jax.Array, kind: str = kind) -> Variables:
            if kind == "start":
                return _init(BlockStart(model), key, stream)
            return _init(Sublayer(model, kind), key, stream, None)

        _scatter(variables, jax.vmap(draw)(keys), places)
    return {name: tree for name, tree in variables.items() if tree}


def apply(
    model: Model,
    variables: Variables,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    features_BMD: jax.Array | None = None,
    remat: str = "none",
    observe: bool = False,
    max_logits: bool = False,
    routes: bool = False,
    routes_BTLA: jax.Array | None = None,
) -> Forward:
    """The forward pass.

    Args:
      variables: from `init`; only "params" is differentiated.
      tokens_BT: int ids.
      segment_ids_BT: int32, 0 = padding, positive = document; None: no padding, one
        document a row.
      features_BMD: from `vision.features`; the k-th placeholder token of a row stands
        for feature k. None: placeholders are tokens like others.
      remat: see the top of this file.
      observe: layers report the statistics of `kimi_jax.modules.statistics`; without,
        `stats` is empty and they cost nothing.
      max_logits: softmax attention also reports max_logit_H, the largest logit of each
        head over the batch, among the statistics. Takes `observe`.
      routes: stats also hold the experts of every token, as in `extend`.
      routes_BTLA: int, experts that the layers with experts, in order of depth, are to
        use; their weights come from the scores of here. A token whose A are all
        num_experts chooses freely. None: all do.
    """
    collections = _asked(observe, max_logits, routes)
    if routes_BTLA is not None:
        variables = variables | {moe.REPLAY: _replay(model, routes_BTLA)}
    depth = _Depth(model, segment_ids_BT, remat, collections)
    return depth.run(variables, tokens_BT, features_BMD, {})[0]


def extend(
    model: Model,
    variables: Variables,
    tokens_BT: jax.Array,
    count_B: jax.Array,
    cache: Cache,
    *,
    features_BMD: jax.Array | None = None,
    routes: bool = False,
) -> tuple[Forward, Cache]:
    """Reads the next tokens of every row: a chunk of a prompt, or one to decode.

    Rows are independent of each other and of how their tokens are cut into calls, up to
    rounding. No expert drops a token. Not differentiable through softmax attention.

    Args:
      tokens_BT: int ids, T >= 1.
      count_B: int32, how many of them each row reads, 0 to T; the rest is padding.
      cache: what was read before, with pages for the new tokens in its table.
      features_BMD: as in `apply`; the k-th placeholder among these T tokens stands for
        feature k.
      routes: stats also hold routes_BTA of every layer with experts, the experts that
        each token used; num_experts stands for none.

    Returns:
      The hidden states of the new tokens, and the cache that holds them as well.
    """
    t_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    segment_ids_BT = (t_T < count_B[:, None]).astype(jnp.int32)
    collections = (STATES, PAGES) + ((moe.ROUTES,) if routes else ())
    where = Where(cache.table_BM, cache.length_B, count_B)
    depth = _Depth(model, segment_ids_BT, "none", collections, where)
    memory = {STATES: cache.states, PAGES: cache.pages}
    out, memory = depth.run(variables, tokens_BT, features_BMD, memory)
    read_B = cache.length_B + count_B
    return out, Cache(memory[STATES], memory[PAGES], cache.table_BM, read_B)


def carry(
    model: Model,
    variables: Variables,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    segment: Segment,
    entry: Variables,
    *,
    remat: str = "none",
    observe: bool = False,
    max_logits: bool = False,
    routes: bool = False,
    routes_BTLA: jax.Array | None = None,
) -> tuple[Forward, Variables]:
    """`apply` to a piece of rows whose tokens before it are in `entry`; differentiable.

    Args:
      entry: as `cache.segment_shape` says, of both kinds, merged.
      others: as in `apply`, of this piece.

    Returns:
      The hidden states of the piece, and what it leaves: its states, and the latents
      of its own tokens.
    """
    variables = variables | {ENTRY: entry}
    if routes_BTLA is not None:
        variables |= {moe.REPLAY: _replay(model, routes_BTLA)}
    asked = _asked(observe, max_logits, routes)
    depth = _Depth(
        model, segment_ids_BT, remat, (*asked, LEAVING), None, segment=segment
    )
    out = depth.run(variables, tokens_BT, None, {})[0]
    flat = traverse_util.flatten_dict(out.stats)
    left = {path: x for path, x in flat.items() if path[-1] in AXES}
    stats = {path: x for path, x in flat.items() if path not in left}
    out = out._replace(stats=traverse_util.unflatten_dict(stats))
    return out, traverse_util.unflatten_dict(left)


def _asked(observe: bool, max_logits: bool, routes: bool) -> tuple[str, ...]:
    """The collections that layers report to."""
    asked = {"stats": observe, attend.MAX_LOGITS: observe and max_logits}
    asked[moe.ROUTES] = routes
    return tuple(name for name, wanted in asked.items() if wanted)


class _Depth(NamedTuple):
    """The way down the layers, and what all of them are told.

    `memory` is the part of the cache that belongs to a subtree, by collection; empty
    without a cache. Scans carry it whole, and layers change their own rows of it, so
    that it is updated in place.
    """

    model: Model
    segment_ids_BT: jax.Array | None
    remat: str
    collections: tuple[str, ...]  # that layers may write to
    where: Where | None = None  # the new tokens stand; None: no cache
    segment: Segment | None = None  # that these tokens are; None: they are all

    def run(
        self,
        variables: Variables,
        tokens_BT: jax.Array,
        features_BMD: jax.Array | None,
        memory: Variables,
    ) -> tuple[Forward, Variables]:
        """The forward pass, and the memory after it."""
        model, stats = self.model, {}
        x_BTD, _ = _call(Embedding(model), _sub(variables, "embedding"), tokens_BT)
        if features_BMD is not None:
            here_BT = vision.placeholders(model, tokens_BT)
            x_BTD = put_features(x_BTD, here_BT, features_BMD)
        time = "time" if self.where is None else None
        x_BTD = sharding.constrain(x_BTD, "rows", time, None)
        stream = start_stream(model, layout.num_blocks(model), x_BTD)
        for s, stage in enumerate(layout.plan(model)):
            name = layout.stage_name(s)

            def body(carry: Any, own: Any, stage=stage) -> tuple[Any, Any]:
                return self._blocks(stage.blocks, *own, *carry)

            if self.remat in ("block", "nested"):
                # In a scan no two iterations share anything: CSE needs no barrier.
                body = jax.checkpoint(body, prevent_cse=False)
            own = (_sub(variables, name), self._count(stage.repeats))
            carry = (stream, _sub(memory, name))
            (stream, new), stats[name] = jax.lax.scan(body, carry, own)
            memory = _put(memory, name, new)
        (h_BTD, unembed_DW), sown = _call(
            Output(model),
            _sub(variables, "output"),
            stream,
            self.segment_ids_BT,
            collections=self.collections,
        )
        stats["output"] = _stats(sown)
        return Forward(h_BTD, unembed_DW, stats), memory

    def _blocks(
        self,
        blocks: tuple[layout.Block, ...],
        variables: Variables,
        outer: jax.Array | None,
        stream: Stream,
        memory: Variables,
    ) -> tuple[Any, Any]:
        """A few residual blocks one after the other: the body of the outer scan."""
        stats: dict[str, Any] = {}
        for b, block in enumerate(blocks):
            own = _sub(variables, layout.start_name(b))
            stream, _ = _call(BlockStart(self.model), own, stream)
            for r, run in enumerate(block):
                name = layout.run_name(b, r)

                def unit(carry: Any, own: Any, bank=stream.bank, run=run) -> Any:
                    partial_BTD, has_partial, memory = carry
                    stream = Stream(partial_BTD, has_partial, bank, None)
                    stream, memory, stats = self._unit(
                        run.unit, own[0], (outer, own[1]), stream, memory
                    )
                    return (stream.partial_BTD, stream.has_partial, memory), stats

                if self.remat in ("unit", "nested"):
                    unit = jax.checkpoint(unit, prevent_cse=False)
                inputs = (_sub(variables, name), self._count(run.repeats))
                carry = (stream.partial_BTD, stream.has_partial, _sub(memory, name))
                carry, stats[name] = jax.lax.scan(unit, carry, inputs)
                stream = stream._replace(partial_BTD=carry[0], has_partial=carry[1])
                memory = _put(memory, name, carry[2])
        return (stream, memory), stats

    def _unit(
        self,
        kinds: tuple[str, ...],
        variables: Variables,
        at: tuple[Any, Any],
        stream: Stream,
        memory: Variables,
    ) -> tuple[Stream, Variables, Any]:
        """A few sublayers: the body of the inner scan."""
        stats: dict[str, Any] = {}
        chunk = self.segment if self.where is None else Chunk(at, self.where)
        for position, kind in enumerate(kinds):
            name = layout.sublayer_name(position)
            stream, sown = _call(
                Sublayer(self.model, kind),
                _sub(variables, name) | _sub(memory, name),
                stream,
                self.segment_ids_BT,
                chunk,
                collections=self.collections,
            )
            stats[name] = _stats(sown)
            memory = _put(memory, name, sown)
        return stream, memory, stats

    def _count(self, repeats: int) -> jax.Array | None:
        return None if self.where is None else jnp.arange(repeats)


def logits(h_ND: jax.Array, unembed_DW: jax.Array) -> jax.Array:
    """Next-token logits in float32 (float64 under x64)."""
    precise = jnp.promote_types(h_ND.dtype, jnp.float32)
    return jnp.matmul(h_ND, unembed_DW, preferred_element_type=precise)


def _call(
    module: nn.Module,
    variables: Variables,
    *inputs: Any,
    collections: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """(result, what was written to `collections`) of a module."""
    result, sown = module.apply(variables, *inputs, mutable=list(collections))
    return result, sown


def _stats(sown: Variables) -> Variables:
    """What a module reported, whichever collection was asked for."""
    flat: dict[Any, Any] = {}
    for name in ("stats", moe.ROUTES, LEAVING):
        flat |= traverse_util.flatten_dict(sown.get(name, {}))
    return traverse_util.unflatten_dict(flat)


def _init(module: nn.Module, key: jax.Array, *inputs: Any) -> Variables:
    return dict(module.init(key, *inputs, mutable=["params", "balance"]))


def _sub(variables: Variables, name: str) -> Variables:
    """The variables of the child `name`, in every collection that has some."""
    return {c: tree[name] for c, tree in variables.items() if name in tree}


def _replay(model: Model, routes_BTLA: jax.Array) -> Variables:
    """routes_BTA of every layer with experts, stacked as their parameters are."""
    places = [p for p in layout.places(layout.plan(model)) if p.kind == "moe"]
    if len(places) != routes_BTLA.shape[2]:
        raise ValueError(
            f"routes_BTLA has shape {routes_BTLA.shape}, and the model has "
            f"{len(places)} layers with experts; give each its own, in order of depth"
        )
    stacked: Variables = {moe.REPLAY: {}}
    _scatter(
        stacked,
        {moe.REPLAY: {"moe": {"routes_BTA": jnp.moveaxis(routes_BTLA, 2, 0)}}},
        places,
    )
    return stacked[moe.REPLAY]


def _put(memory: Variables, name: str, new: Variables) -> Variables:
    """`memory` with the child `name` replaced in the collections that have it."""
    return {
        c: tree | {name: new[c]} if name in tree else tree for c, tree in memory.items()
    }


def _store(variables: Variables, path: str, drawn: Variables) -> None:
    *parents, last = path.split("/")
    for collection, tree in drawn.items():
        node = variables[collection]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = tree


def _scatter(
    variables: Variables, drawn: Variables, places: list[layout.Place]
) -> None:
    """Put row i of `drawn` where `places[i]` says, stacked as the scans want it."""
    rows: dict[str, list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place.path, []).append(row)
        shapes[place.path] = tuple(i + 1 for i in place.at)
    for path, chosen in rows.items():

        def stack(x: jax.Array, path=path, chosen=chosen) -> jax.Array:
            return x[jnp.array(chosen)].reshape(*shapes[path], *x.shape[1:])

        _store(variables, path, jax.tree.map(stack, drawn))
