"""Reading and decoding as compiled programs, for devices that are here or not.

All of them take the cache and give it back in place. Rows of a call that have nothing
to do cost time but change nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from kimi_jax import canonical, config, sharding
from kimi_jax.infer.sampling import Knobs, draw
from kimi_jax.modules import transformer
from kimi_jax.modules.cache import Cache, cache_shape, constrain, shards


class Ask(NamedTuple):
    """What every row does in one call of `decode`."""

    forced_BK: Any  # int32, tokens to be read before any is drawn
    forced_B: Any  # int32, how many; 0: the row rests
    wanted_B: Any  # int32, most tokens to draw
    stop_BSL: Any  # int32, sequences that end a row, right-aligned; -1: any token
    recent_BL: Any  # int32, the last tokens drawn, -1 before the first
    knobs: Knobs


class Drawn(NamedTuple):
    """What `decode` brings back; K steps."""

    token_KB: jax.Array  # int32, -1 where a row drew none
    logprob_KB: jax.Array  # see `sampling.draw`
    length_B: jax.Array  # tokens read, as in the cache
    routes_KBLA: jax.Array | None  # experts of the token read, num_experts: none


@functools.partial(
    jax.jit, static_argnames=("model", "routes"), donate_argnames="cache"
)
def read(
    model: config.Model,
    variables: Any,
    cache: Cache,
    row_S: jax.Array,
    tokens_ST: jax.Array,
    count_S: jax.Array,
    features_SMD: jax.Array | None = None,
    *,
    routes: bool = False,
) -> tuple[Cache, jax.Array | None]:
    """Reads a chunk of prompt into one row of each of the S parts of the rows.

    Args:
      row_S: counted in its part.
      tokens_ST: int ids.
      count_S: how many each row reads; 0: none.
      features_SMD: see `transformer.extend`.

    Returns:
      The cache; with `routes`, routes_STLA.
    """
    part = _take_rows(cache, row_S)
    out, part = transformer.extend(
        model,
        variables,
        tokens_ST,
        count_S,
        part,
        features_BMD=features_SMD,
        routes=routes,
    )
    chosen = canonical.routes(model, out.stats) if routes else None
    return constrain(_put_rows(cache, row_S, part)), chosen


@functools.partial(
    jax.jit, static_argnames=("model", "routes"), donate_argnames="cache"
)
def decode(
    model: config.Model,
    variables: Any,
    cache: Cache,
    ask: Ask,
    allowed_W: jax.Array,
    *,
    routes: bool = False,
) -> tuple[Cache, Drawn]:
    """Up to K tokens of every row; ends early when no row has anything left to do.

    A row reads its forced tokens, then each token that it drew in the step before. It
    ends with `wanted_B` tokens, or those of a stop sequence. The last token that it
    drew is not read yet.
    """
    K = ask.forced_BK.shape[1]

    def reads(state: _Decoding) -> jax.Array:
        goes_on_B = (state.left_B > 0) & (ask.forced_B > 0)
        return (state.k < ask.forced_B) | goes_on_B

    def more(state: _Decoding) -> jax.Array:
        return (state.k < K) & jnp.any(reads(state))

    def step(state: _Decoding) -> _Decoding:
        k, reads_B = state.k, reads(state)
        given_B = jax.lax.dynamic_index_in_dim(ask.forced_BK, k, 1, keepdims=False)
        token_B = jnp.where(k < ask.forced_B, given_B, state.last_B)
        cache, logits_BW, chosen = _step(
            model, variables, state.cache, routes, token_B, reads_B
        )
        token_B, logprob_B = draw(logits_BW, cache.length_B, ask.knobs, allowed_W)
        draws_B = reads_B & (k >= ask.forced_B - 1) & (state.left_B > 0)
        return _record(state, ask, cache, token_B, logprob_B, draws_B, chosen)

    state = jax.lax.while_loop(more, step, _before(model, cache, ask, routes))
    drawn = state.drawn._replace(length_B=state.cache.length_B)
    whole = jax.tree.map(lambda x: sharding.constrain(x, *(None,) * x.ndim), drawn)
    return constrain(state.cache), whole


class _Decoding(NamedTuple):
    """What the steps of `decode` hand on."""

    k: jax.Array
    cache: Cache
    last_B: Any  # int32, the token drawn last
    left_B: Any  # int32, tokens that may still be drawn
    recent_BL: Any
    drawn: Drawn


def _before(model: config.Model, cache: Cache, ask: Ask, routes: bool) -> _Decoding:
    B, K = ask.forced_BK.shape
    wide = jnp.promote_types(model.dtype, jnp.float32)
    routes_KBLA = None
    if routes:
        shape = (K, B, *routes_shape(model))
        routes_KBLA = jnp.full(shape, model.moe.num_experts, jnp.int32)
    token_KB = jnp.full((K, B), -1, jnp.int32)
    drawn = Drawn(token_KB, jnp.zeros((K, B), wide), cache.length_B, routes_KBLA)
    first_B, zero = ask.forced_BK[:, 0], jnp.zeros((), jnp.int32)
    left_B, recent_BL = jnp.asarray(ask.wanted_B), jnp.asarray(ask.recent_BL)
    return _Decoding(zero, cache, jnp.asarray(first_B), left_B, recent_BL, drawn)


def _record(
    state: _Decoding,
    ask: Ask,
    cache: Cache,
    token_B: jax.Array,
    logprob_B: jax.Array,
    draws_B: jax.Array,
    chosen: jax.Array | None,
) -> _Decoding:
    """The state after a step: what was drawn, and which rows that ended."""
    k, drawn = state.k, state.drawn
    moved_BL = jnp.concatenate([state.recent_BL[:, 1:], token_B[:, None]], axis=1)
    recent_BL = jnp.where(draws_B[:, None], moved_BL, state.recent_BL)
    left_B = jnp.where(draws_B, state.left_B - 1, state.left_B)
    left_B = jnp.where(draws_B & _stops(recent_BL, ask.stop_BSL), 0, left_B)
    drawn = drawn._replace(
        token_KB=drawn.token_KB.at[k].set(jnp.where(draws_B, token_B, -1)),
        logprob_KB=drawn.logprob_KB.at[k].set(logprob_B),
    )
    if drawn.routes_KBLA is not None and chosen is not None:
        drawn = drawn._replace(routes_KBLA=drawn.routes_KBLA.at[k].set(chosen))
    return _Decoding(k + 1, cache, token_B, left_B, recent_BL, drawn)


def _step(
    model: config.Model,
    variables: Any,
    cache: Cache,
    routes: bool,
    token_B: jax.Array,
    reads_B: jax.Array,
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """One token of each row that reads: the cache, logits_BW, routes_BLA."""
    out, cache = transformer.extend(
        model,
        variables,
        token_B[:, None],
        reads_B.astype(jnp.int32),
        cache,
        routes=routes,
    )
    logits_BW = transformer.logits(out.h_BTD[:, 0], out.unembed_DW)
    logits_BW = sharding.constrain(logits_BW, "rows", "vocab")
    chosen = canonical.routes(model, out.stats)[:, 0] if routes else None
    return constrain(cache), logits_BW, chosen


def _stops(recent_BL: jax.Array, stop_BSL: jax.Array) -> jax.Array:
    """Whether a row ends with one of its stop sequences."""
    same_BSL = (stop_BSL < 0) | (stop_BSL == recent_BL[:, None])
    return jnp.any(jnp.all(same_BSL, axis=-1) & jnp.any(stop_BSL >= 0, axis=-1), axis=1)


def routes_shape(model: config.Model) -> tuple[int, int]:
    """(L, A): layers with experts, experts of a token."""
    moe = model.moe
    threshold = moe.balancing.method == "quantile_threshold"
    active = moe.balancing.threshold_cap if threshold else moe.num_active
    return config.ffn_kinds(model).count("moe"), active


@functools.partial(jax.jit, donate_argnums=0)
def clear_row(cache: Cache, row: jax.Array) -> Cache:
    """Empties the states of a row; its pages need no clearing."""
    states = jax.tree.map(lambda x: x.at[:, :, row].set(0), cache.states)
    return constrain(cache._replace(states=states))


@functools.partial(jax.jit, donate_argnums=0)
def copy_states(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Copies the states of a row."""
    states = _copied(cache.states, source, target)
    return constrain(cache._replace(states=states))


@functools.partial(jax.jit, donate_argnums=0)
def copy_page(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Copies a page, in all layers."""
    return constrain(cache._replace(pages=_copied(cache.pages, source, target)))


def _copied(tree: Any, source: jax.Array, target: jax.Array) -> Any:
    """Arrays [R, U, rows or pages, ...] with one of them written over another."""
    return jax.tree.map(lambda x: x.at[:, :, target].set(x[:, :, source]), tree)


@jax.jit
def save_row(cache: Cache, row: jax.Array, page_L: jax.Array) -> tuple[Any, Any]:
    """The states of a row and the pages named."""
    states = jax.tree.map(lambda x: x[:, :, row], cache.states)
    saved = states, jax.tree.map(lambda x: x[:, :, page_L], cache.pages)
    return jax.tree.map(lambda x: sharding.constrain(x, *(None,) * x.ndim), saved)


@functools.partial(jax.jit, donate_argnums=0)
def load_row(cache: Cache, row: jax.Array, page_L: jax.Array, saved: Any) -> Cache:
    """Undoes `save_row`, into any row and pages; pages N or beyond are dropped."""
    states = jax.tree.map(
        lambda x, new: x.at[:, :, row].set(new), cache.states, saved[0]
    )
    pages = jax.tree.map(
        lambda x, new: x.at[:, :, page_L].set(new, mode="drop"), cache.pages, saved[1]
    )
    return constrain(cache._replace(states=states, pages=pages))


def _take_rows(cache: Cache, row_S: jax.Array) -> Cache:
    """The cache of one row of each part."""
    S = len(row_S)

    def take(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, axis, 0)
        parts = x.reshape(S, -1, *x.shape[1:])
        rows = jax.vmap(lambda part, i: part[i])(parts, row_S)
        return jnp.moveaxis(rows, 0, axis)

    states = jax.tree.map(lambda x: take(x, 2), cache.states)
    return Cache(states, cache.pages, take(cache.table_BM, 0), take(cache.length_B, 0))


def _put_rows(cache: Cache, row_S: jax.Array, part: Cache) -> Cache:
    """`cache` after what happened to these rows."""
    S = len(row_S)

    def put(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        x, new = jnp.moveaxis(x, axis, 0), jnp.moveaxis(new, axis, 0)
        parts = x.reshape(S, -1, *x.shape[1:])
        parts = jax.vmap(lambda part, i, row: part.at[i].set(row))(parts, row_S, new)
        return jnp.moveaxis(parts.reshape(x.shape), 0, axis)

    states = jax.tree.map(lambda x, new: put(x, new, 2), cache.states, part.states)
    length_B = put(cache.length_B, part.length_B, 0)
    return Cache(states, part.pages, cache.table_BM, length_B)


def lower_read(
    cfg: config.Config, mesh: Mesh, slots: int, length: int, chunk: int, **options: Any
) -> Any:
    """`read` of `chunk` tokens, lowered for `mesh`: shapes alone, nothing is allocated.

    Args:
      slots, length: of the cache.
      options: of `cache_shape`.
    """
    parts = shards(mesh)[0]
    row_S, variables = _whole(mesh, (parts,)), variables_shape(cfg.model, mesh)
    with jax.set_mesh(mesh):
        return read.lower(
            cfg.model,
            variables,
            cache_shape(cfg.model, slots, length, mesh=mesh, **options),
            row_S,
            _whole(mesh, (parts, chunk)),
            row_S,
        )


def lower_decode(
    cfg: config.Config, mesh: Mesh, slots: int, length: int, **options: Any
) -> Any:
    """`decode` of one step, lowered as `lower_read`."""
    B, model = slots, cfg.model
    number, real = _whole(mesh, (B,)), _whole(mesh, (B,), jnp.float32)
    knobs = Knobs(_whole(mesh, (B,), jnp.uint32), real, number, real, real)
    stop_BSL, recent_BL = _whole(mesh, (B, 1, 1)), _whole(mesh, (B, 1))
    forced_BK = _whole(mesh, (B, 1))
    ask = Ask(forced_BK, number, number, stop_BSL, recent_BL, knobs)
    variables = variables_shape(model, mesh)
    with jax.set_mesh(mesh):
        return decode.lower(
            model,
            variables,
            cache_shape(model, slots, length, mesh=mesh, **options),
            ask,
            _whole(mesh, (model.vocab_size,), jnp.bool_),
        )


def variables_shape(model: config.Model, mesh: Mesh) -> Any:
    """Shapes of the parameters, kept in the dtype of the activations, on `mesh`."""
    shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    places = sharding.state_shardings(mesh, shapes)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, model.dtype, sharding=where),
        shapes,
        places,
    )


def _whole(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    where: NamedSharding = sharding.replicated(mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
