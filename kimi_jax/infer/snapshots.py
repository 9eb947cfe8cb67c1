"""Many live sequences on the host and back, pages that they share only once.

A saved sequence is a dict of plain values and numpy arrays:

    tokens, read      as in `Live`
    slot              where it lay
    source, shared    which sequence before it in the list has the same first pages
                      (-1: none), and how many pages those are
    routes            experts of the tokens read, [read, L, A]; None: not recorded
    states, pages     arrays by name; pages without the shared ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax import canonical
from kimi_jax.errors import UserError
from kimi_jax.infer.slots import Live, Slots, Snapshot

Saved = dict[str, Any]


def save_all(slots: Slots, sequences: Sequence[Live]) -> list[Saved]:
    """The sequences, exactly; they live on, and nothing that is pending is read."""
    saved: list[Saved] = []
    for index, sequence in enumerate(sequences):
        shared, source = 0, -1
        for i, other in enumerate(sequences[:index]):
            count = slots.pager.common(other.slot, sequence.slot)
            if count > shared:
                shared, source = count, i
        snapshot = slots.save(sequence, skip=shared)
        routes = np.concatenate(snapshot.routes) if snapshot.routes else None
        saved.append(
            {
                "tokens": snapshot.tokens,
                "read": snapshot.read,
                "slot": sequence.slot,
                "source": source,
                "shared": shared,
                "routes": routes,
                "states": _by_name(snapshot.states),
                "pages": _by_name(snapshot.pages),
            }
        )
    return saved


def load_all(slots: Slots, saved: Sequence[Saved], rooms: Sequence[int]) -> list[Live]:
    """The sequences in the slots where they lay, sharing what they shared.

    Args:
      rooms: tokens that will come in addition, for each; see `Slots.open`.

    Raises:
      UserError: another model, other sizes, or a slot that is taken.
    """
    live: list[Live] = []
    for one, room in zip(saved, rooms, strict=True):
        routes = [] if one["routes"] is None else [one["routes"]]
        snapshot = Snapshot(
            list(one["tokens"]),
            one["read"],
            routes,
            _as_tree(slots.cache.states, one["states"]),
            _as_tree(slots.cache.pages, one["pages"]),
        )
        prefix = (live[one["source"]], one["shared"]) if one["shared"] else None
        live.append(slots.load(snapshot, room=room, slot=one["slot"], prefix=prefix))
    return live


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {canonical.path_name(path): leaf for path, leaf in leaves}


def _as_tree(cache: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Arrays by name as part of the cache, whose third axis they lack or have shorter.

    Raises:
      UserError: they are not of this cache.
    """

    def find(path: Any, x: Any) -> np.ndarray:
        name = canonical.path_name(path)
        array, want = arrays.get(name), _without_third(x.shape)
        if array is None:
            array = np.zeros(0)
        shapes = array.shape, _without_third(array.shape)
        if array.dtype == x.dtype and want in shapes:
            return array
        raise UserError(
            f"a saved sequence does not fit: {name} is {array.dtype} {array.shape}, "
            f"and the cache has {x.dtype} {x.shape}; load it with the model, page size "
            "and cache dtype that it was saved with"
        )

    return jax.tree_util.tree_map_with_path(find, cache)


def _without_third(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], *shape[3:])
