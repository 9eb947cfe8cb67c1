"""Softmax attention as the layers call it, on any mesh.

The layers hand over what keys and values are made of and a function that makes them, so
that with time split over devices only the narrow latents travel. The largest logits are
reported where they are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kimi_jax import sharding
from kimi_jax.modules import islands, parameters
from kimi_jax.modules.cache import AXES, ENTRY, LEAVING, PAGES, Chunk, Segment
from kimi_jax.ops import attention, context_attention
from kimi_jax.ops.paged_attention import Where, paged_attention, write_pages
from kimi_jax.ops.rotary import rotate, rotate_pair, rotate_pair_from

# A caller asks by making this collection mutable; nothing is kept in it. It is a
# question to the layers and no field of the model, which it does not change.
MAX_LOGITS = "max_logits"

Expand = Callable[[Any, Any], tuple[jax.Array, jax.Array]]


def attend(
    module: nn.Module,
    q_BTHK: jax.Array,
    latents: Sequence[jax.Array],
    expand: Expand,
    weights: Sequence[jax.Array] = (),
    *,
    latent_axes: Sequence[sharding.Axes],
    weight_axes: Sequence[sharding.Axes] = (),
    segment_ids_BT: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """`attention` of queries to expand(weights, latents) -> (k_BTGK, v_BTGV).

    Sows the statistic max_logit_H if asked to.

    Args:
      latents: [B, T, ...] each; all that keys and values are made of.
      latent_axes, weight_axes: the logical axes of each.
      options: scale and block_size.
    """
    with_max = module.is_mutable_collection(MAX_LOGITS)
    heads = ("rows", "time", "heads", None)
    o_BTHV, max_logit_H = islands.island(
        functools.partial(_local, len(latents), expand, with_max, options),
        q_BTHK,
        segment_ids_BT,
        *latents,
        *weights,
        inputs=(
            heads,
            None if segment_ids_BT is None else ("rows", "time"),
            *latent_axes,
            *weight_axes,
        ),
        outputs=(heads, ("heads",)),
    )
    if with_max:
        parameters.sow_stat(module, "max_logit_H", max_logit_H)
    return o_BTHV


def _local(
    num_latents: int,
    expand: Expand,
    with_max: bool,
    options: dict[str, Any],
    q_BTHK: jax.Array,
    ids_BT: jax.Array | None,
    *rest: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """o_BTHV and max_logit_H, zeros if not asked for, of a device's heads and time."""
    latents, weights = rest[:num_latents], rest[num_latents:]
    axis = islands.axis_if_split("context")
    if axis is not None:
        result = _over_time(
            q_BTHK, latents, expand, weights, ids_BT, axis, with_max, options
        )
    else:
        k_BTGK, v_BTGV = expand(weights, latents)
        run: Callable[..., Any] = attention.attention
        if with_max:
            run = attention.attention_with_max_logits
        result = run(q_BTHK, k_BTGK, v_BTGV, segment_ids_BT=ids_BT, **options)
    if not with_max:
        return result, jnp.zeros(q_BTHK.shape[2], jnp.float32)
    o_BTHV, max_logit_H = result
    if sharding.context_mesh() is not None:
        # The maximum over the devices that hold other rows.
        max_logit_H = jax.lax.pmax(max_logit_H, sharding.ROWS)
    return o_BTHV, max_logit_H


def _over_time(
    q_BTHK: jax.Array,
    latents: Any,
    expand: Expand,
    weights: Any,
    ids_BT: jax.Array | None,
    axis: str,
    with_max: bool,
    options: dict[str, Any],
) -> Any:
    B, T = q_BTHK.shape[:2]
    width = sum(x[0, 0].size for x in latents)
    length = T * jax.lax.axis_size(axis)
    form, _ = context_attention.choose_attention(length, width, batch=B)
    run: Callable[..., Any] = context_attention.context_attention
    if with_max:
        run = context_attention.context_attention_with_max_logits
    return run(
        q_BTHK,
        latents,
        expand,
        weights,
        axis=axis,
        form=form,
        segment_ids_BT=ids_BT,
        **options,
    )


def attend_cached(
    module: nn.Module,
    q_BTHK: jax.Array,
    latents: Sequence[jax.Array],
    expand: Expand,
    weights: Sequence[jax.Array] = (),
    *,
    names: Sequence[str],
    chunk: Chunk,
    latent_axes: Sequence[sharding.Axes],
    weight_axes: Sequence[sharding.Axes] = (),
    **options: Any,
) -> jax.Array:
    """`attend` of new tokens to the past in the cache and to themselves.

    Writes their latents to the module's pages `names` first. Latents of the past come
    from there, in the dtype of the pages.
    """
    pools: list[jax.Array] = [module.get_variable(PAGES, name) for name in names]
    heads, lead = ("rows", None, "heads", None), (None, None)
    pool_axes = [(*lead, *AXES[name]) for name in names]
    o_BTHV, *pools = islands.island(
        functools.partial(_local_cached, len(latents), expand, options),
        q_BTHK,
        *chunk.at,
        *chunk.where,
        *latents,
        *pools,
        *weights,
        inputs=(
            *(heads, (), (), ("rows", None), ("rows",), ("rows",)),
            *(*latent_axes, *pool_axes, *weight_axes),
        ),
        outputs=(heads, *pool_axes),
    )
    for name, pool in zip(names, pools, strict=True):
        module.put_variable(PAGES, name, pool)
    return o_BTHV


def _local_cached(
    n: int,
    expand: Expand,
    options: dict[str, Any],
    q_BTHK: jax.Array,
    outer: jax.Array,
    inner: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    where, latents = Where(*rest[:3]), rest[3 : 3 + n]
    pools, weights = rest[3 + n : 3 + 2 * n], rest[3 + 2 * n :]
    at, axis = (outer, inner), islands.axis_if_split("context")
    pools = tuple(
        write_pages(pool, at, new, where, axis)
        for pool, new in zip(pools, latents, strict=True)
    )

    def expand_cast(latents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return expand(weights, [x.astype(q_BTHK.dtype) for x in latents])

    o_BTHV = paged_attention(
        q_BTHK, pools, at, where, expand_cast, axis=axis, **options
    )
    return o_BTHV, *pools


def attend_carried(
    module: nn.Module,
    q_BTHK: jax.Array,
    latents: Sequence[jax.Array],
    expand: Expand,
    weights: Sequence[jax.Array] = (),
    *,
    names: Sequence[str],
    segment: Segment,
    latent_axes: Sequence[sharding.Axes],
    weight_axes: Sequence[sharding.Axes] = (),
    segment_ids_BT: jax.Array,
    **options: Any,
) -> jax.Array:
    """`attend` of a piece of rows to the pieces before it and to itself.

    Finds their latents in the module's collection `entry`, under `names`, and leaves
    its own there for the pieces to come.
    """
    past: list[jax.Array] = [module.get_variable(ENTRY, name) for name in names]
    for name, own in zip(names, latents, strict=True):
        module.put_variable(LEAVING, name, own)
    heads = ("rows", None, "heads", None)
    past_axes = [(None, *axes) for axes in latent_axes]
    o_BTHV, max_BTH = islands.island(
        functools.partial(_local_carried, len(latents), expand, options),
        q_BTHK,
        *segment,
        *latents,
        *past,
        *weights,
        inputs=(
            *(heads, (), ("rows", None)),
            *(*latent_axes, *past_axes, *weight_axes),
        ),
        outputs=(heads, heads[:3]),
    )
    real_BT1 = (segment_ids_BT > 0)[:, :, None]
    if module.is_mutable_collection(MAX_LOGITS):
        max_BTH = jnp.where(real_BT1, jax.lax.stop_gradient(max_BTH), -jnp.inf)
        parameters.sow_stat(module, "max_logit_H", jnp.max(max_BTH, axis=(0, 1)))
    return jnp.where(real_BT1[..., None], o_BTHV, 0)


def _local_carried(
    n: int,
    expand: Expand,
    options: dict[str, Any],
    q_BTHK: jax.Array,
    index: jax.Array,
    start_BT: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`carried_attention` of a device's rows and heads."""
    latents, past, weights = rest[:n], rest[n : 2 * n], rest[2 * n :]
    return context_attention.carried_attention(
        q_BTHK,
        latents,
        past,
        index,
        expand,
        weights,
        start_BT=start_BT,
        **options,
    )


def rotated(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None,
    chunk: Chunk | Segment | None,
    base: float,
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, turned by their positions, wherever these are to be found."""
    if chunk is None:
        return rotate_pair(q_BTHK, k_BTGK, segment_ids_BT, base)
    if isinstance(chunk, Chunk):
        return rotate_pair_from(q_BTHK, k_BTGK, chunk.where.start_B, base)
    t_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.int32)
    positions_BT = t_T - chunk.start_BT
    return rotate(q_BTHK, positions_BT, base), rotate(k_BTGK, positions_BT, base)


def keys_and_values(
    _: Any, latents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The `expand` of latents that are the keys and values already."""
    k_BTGK, v_BTGV = latents
    return k_BTGK, v_BTGV


def split_latent(
    weights: Sequence[jax.Array], latents: Sequence[jax.Array], nope: int
) -> tuple[jax.Array, jax.Array]:
    """The `expand` of MLA: heads from the latent, and the key channels they share.

    Args:
      weights: kv_b [R, H, nope + V].
      latents: the normed latent [B, T, R]; the shared key channels [B, T, 1, pe].
    """
    (kv_RHK,), (latent_BTR, k_pe_BTGK) = weights, latents
    kv_BTHK = jnp.einsum("btr,rhk->bthk", latent_BTR, kv_RHK)
    k_nope_BTHK, v_BTHV = jnp.split(kv_BTHK, [nope], axis=-1)
    pe = k_pe_BTGK.shape[-1]
    k_pe_BTHK = jnp.broadcast_to(k_pe_BTGK, (*k_nope_BTHK.shape[:-1], pe))
    return jnp.concatenate([k_nope_BTHK, k_pe_BTHK], axis=-1), v_BTHV


def absorbed_latent(
    _: Any, latents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The `expand` of absorbed MLA: one key head, the latent with the shared channels.

    Its queries are multiplied by the key half of kv_b, and its outputs by the other.
    """
    latent_BTR, k_pe_BTGK = latents
    latent_BTGR = latent_BTR[:, :, None]
    return jnp.concatenate([latent_BTGR, k_pe_BTGK], axis=-1), latent_BTGR
