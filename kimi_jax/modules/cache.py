"""What the model remembers of the tokens that it has read, as one pytree.

    layer   array     shape of one layer       dtype             grows with length
    kda     state     [B, H, K, V]             float32 or wider  no
            *_tail    [B, W - 1, H, K or V]    of activations    no
    mla     latent    [N, P, R]                `dtype`           by pages
            pe        [N, P, 1, pe]            `dtype`           by pages
    gqa     k, v      [N, P, G, K]             `dtype`           by pages

Layers are stacked as their parameters are, [stage repeats, run repeats, ...], and named
by the same paths, so the depth stays two scans. Residual schemes keep nothing: they mix
over depth and not over time. Pages of P tokens lie in one pool of N for all rows, which
`table_BM` deals out (see `kimi_jax.ops.paged_attention`): rows may share pages.

On a mesh rows are split as those of a batch, heads over `tensor`, and the pages of the
rows of a device over `context`: page i of a row lies on rank i mod X, and the table
counts pages on that device.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kimi_jax import config, layout, sharding
from kimi_jax.ops.paged_attention import Where

# The collections of variables in which layers find their part, and leave it.
STATES, PAGES = "states", "pages"
# And those for the past of a `Segment`, and what it leaves to the next one.
ENTRY, LEAVING = "entry", "leaving"

AXES: dict[str, sharding.Axes] = {
    "state": ("rows", "heads", None, None),
    **dict.fromkeys(("q_tail", "k_tail", "v_tail"), ("rows", None, "heads", None)),
    "latent": ("tokens", None, None),
    "pe": ("tokens", None, None, None),
    **dict.fromkeys(("k", "v"), ("tokens", None, "heads", None)),
}


class Cache(NamedTuple):
    """The past of B rows."""

    states: dict[str, Any]  # of fixed size; the third axis of each array is B
    pages: dict[str, Any]  # the pool; the third axis of each array is N
    table_BM: Any  # int32; a row needs entries for the tokens that it holds only
    length_B: Any  # int32, tokens read


class Chunk(NamedTuple):
    """What a layer is told of the new tokens, and where its part of the cache is."""

    at: tuple[jax.Array, jax.Array]  # on the leading axes
    where: Where


class Segment(NamedTuple):
    """What a layer is told of a piece of rows that are read in pieces of equal length.

    Unlike a `Chunk` it may hold several documents of a row, and is differentiable: its
    past is an input, and what it leaves an output.
    """

    number: jax.Array  # int32 scalar: how many pieces came before
    start_BT: jax.Array  # int32, see `context_attention.carried_attention`

    def continues_B(self, segment_ids_BT: jax.Array) -> jax.Array:
        """Whether the first document of a row began in an earlier piece, bool."""
        return jnp.any((segment_ids_BT > 0) & (self.start_BT < 0), axis=1)


def segment_shape(
    model: config.Model, batch: int, pieces: int, length: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes and dtypes of the past of a `Segment`, stacked as in a `Cache`.

    Returns:
      What a piece hands to the next, with B on the third axis, and what all pieces
      leave to those after them, [*, *, pieces, B, length, ...].
    """
    handed: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for path, lead, kind in _layers(model):
        for name, shape, wide in _arrays(model, kind, batch, batch, length):
            tree, many = (handed, ()) if kind == "kda" else (kept, (pieces,))
            dtype: Any = model.dtype
            if wide:
                dtype = jnp.promote_types(model.dtype, jnp.float32)
            node = _node(tree, path, kind)
            node[name] = jax.ShapeDtypeStruct((*lead, *many, *shape), dtype)
    return handed, kept


def init_cache(
    model: config.Model,
    batch: int,
    length: int,
    *,
    page_size: int = 128,
    num_pages: int | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Cache:
    """An empty cache of `batch` rows of up to `length` tokens each.

    Args:
      page_size: P, tokens.
      num_pages: N over all devices, to be dealt out by the caller; None: enough for all
        rows at full length, dealt out already, which makes it a fixed buffer.
      dtype: of pages; None: of the activations.
      mesh: where it will be used; None: one device.

    Raises:
      ValueError: `batch` or `num_pages` is not divided by the mesh.
    """
    shapes = cache_shape(
        model,
        batch,
        length,
        page_size=page_size,
        num_pages=num_pages,
        dtype=dtype,
        mesh=mesh,
    )

    def make() -> Cache:
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if num_pages is None:
            table_BM = jnp.asarray(_fixed_table(shapes.table_BM, mesh))
            cache = cache._replace(table_BM=table_BM)
        return constrain(cache)

    # Laid out in the same words as by the programs that take it and give it back: they
    # would be compiled once more for others of the same meaning.
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return jax.jit(make)()


def cache_shape(
    model: config.Model,
    batch: int,
    length: int,
    *,
    page_size: int = 128,
    num_pages: int | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Cache:
    """Shapes, dtypes and, with a mesh, shardings of `init_cache`."""
    rows, ranks = shards(mesh)
    columns = -(-length // (page_size * ranks)) * ranks
    pages = batch * columns if num_pages is None else num_pages
    for name, size, parts in (
        ("batch", batch, rows),
        ("num_pages", pages, rows * ranks),
    ):
        if size % parts:
            raise ValueError(
                f"{name}={size} is not a multiple of {parts}, the parts that the mesh "
                f"splits it into; choose {-(-size // parts) * parts}"
            )
    trees: dict[str, dict[str, Any]] = {STATES: {}, PAGES: {}}
    for path, lead, kind in _layers(model):
        for name, shape, wide in _arrays(model, kind, batch, pages, page_size):
            collection = STATES if kind == "kda" else PAGES
            to: Any = dtype or model.dtype if collection == PAGES else model.dtype
            if wide:
                to = jnp.promote_types(model.dtype, jnp.float32)
            node = _node(trees[collection], path, kind)
            node[name] = _placed((*lead, *shape), to, AXES[name], mesh)
    table_BM = _placed((batch, columns), jnp.int32, ("rows", None), mesh)
    length_B = _placed((batch,), jnp.int32, ("rows",), mesh)
    return Cache(trees[STATES], trees[PAGES], table_BM, length_B)


def shards(mesh: Mesh | None) -> tuple[int, int]:
    """Parts of the rows, and of the pages of a row."""
    if mesh is None:
        return 1, 1
    return sharding.row_shards(mesh), mesh.shape["context"]


def constrain(cache: Cache) -> Cache:
    """`cache`, laid out as `init_cache` lays it out on the mesh that is set."""

    def place(path: Any, x: jax.Array) -> jax.Array:
        axes = AXES[path[-1].key]
        return sharding.constrain(x, *(None,) * (x.ndim - len(axes)), *axes)

    states, pages = (
        jax.tree_util.tree_map_with_path(place, tree)
        for tree in (cache.states, cache.pages)
    )
    table_BM = sharding.constrain(cache.table_BM, "rows", None)
    return Cache(states, pages, table_BM, sharding.constrain(cache.length_B, "rows"))


def cache_bytes(cache: Cache) -> dict[str, int]:
    """Bytes of each part, over all devices: states, tails, pages."""
    parts = {"states": 0, "conv tails": 0, "pages": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache.states):
        tail = str(path[-1].key).endswith("_tail")
        parts["conv tails" if tail else "states"] += _bytes(leaf)
    parts["pages"] = sum(map(_bytes, jax.tree.leaves(cache.pages)))
    return parts


def _fixed_table(shape: Any, mesh: Mesh | None) -> np.ndarray:
    """The table of a pool in which every row owns `columns` pages."""
    (batch, columns), (rows, ranks) = shape.shape, shards(mesh)
    own_L = np.arange(columns, dtype=np.int32) // ranks
    row_B = np.arange(batch, dtype=np.int32) % (batch // rows)
    return row_B[:, None] * (columns // ranks) + own_L


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _node(tree: dict[str, Any], path: str, kind: str) -> dict[str, Any]:
    """The part of a layer in a tree, made if it is not there."""
    for key in (*path.split("/"), kind):
        tree = tree.setdefault(key, {})
    return tree


def _layers(model: config.Model) -> list[tuple[str, tuple[int, int], str]]:
    """(path, leading axes, kind) of every stack of attention layers."""
    found: dict[str, tuple[tuple[int, int], str]] = {}
    for place in layout.places(layout.plan(model)):
        if place.kind in ("kda", "mla", "gqa"):
            outer, inner = place.at
            found[place.path] = (outer + 1, inner + 1), place.kind
    return [(path, lead, kind) for path, (lead, kind) in found.items()]


def _arrays(
    model: config.Model, kind: str, B: int, N: int, P: int
) -> list[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, whether it is float32 or wider) of one layer's arrays."""
    if kind == "kda":
        kda = model.kda
        H, K, V = kda.num_heads, kda.key_dim, kda.value_dim
        found: list[tuple[str, tuple[int, ...], bool]] = [("state", (B, H, K, V), True)]
        if kda.conv_width is not None:
            reach = kda.conv_width - 1
            sizes = {"q_tail": K, "k_tail": K, "v_tail": V}
            found += [(n, (B, reach, H, size), False) for n, size in sizes.items()]
        return found
    if kind == "mla":
        mla = model.mla
        pe = ("pe", (N, P, 1, mla.pe_dim), False)
        return [("latent", (N, P, mla.kv_rank), False), pe]
    gqa = model.gqa
    return [(name, (N, P, gqa.num_kv_heads, gqa.head_dim), False) for name in "kv"]


def _placed(shape: Any, dtype: Any, axes: sharding.Axes, mesh: Mesh | None) -> Any:
    where = None
    if mesh is not None:
        lead = (None,) * (len(shape) - len(axes))
        where = NamedSharding(mesh, sharding.spec(*lead, *axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
