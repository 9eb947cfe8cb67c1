"""How a stack of layers becomes nested scans, and how to find a layer again.

A model of L layers is 2 L sublayers: attention, FFN, attention, FFN, ... They are cut
into residual blocks, and equal neighbours are folded into scans, so that compile time
grows with the number of *different* layers and not with depth:

    Stage   a few blocks, scanned `repeats` times        (K3: blocks 1-6 are equal)
    Run     a unit of sublayers inside a block, scanned  (K3: three times K K K M)
    unit    the sublayer kinds that are written out once

Parameters of a sublayer therefore carry two leading axes [stage repeats, run repeats];
what a block owns by itself carries the first of them. `canonical` translates to names
that know nothing of scans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kimi_jax.config import Model, attention_kinds, ffn_kinds


@dataclasses.dataclass(frozen=True)
class Run:
    """`unit` (sublayer kinds) applied `repeats` times in a row."""

    unit: tuple[str, ...]
    repeats: int


Block = tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """`blocks` (residual blocks) applied `repeats` times in a row."""

    blocks: tuple[Block, ...]
    repeats: int


class Place(NamedTuple):
    """Where something of the model lives, in the stacked tree and in the canonical."""

    name: str  # canonical: "layer_007/ffn", or "block_003/start"
    path: str  # in the stacked tree, as "stage_1/block_0_run_2/sublayer_3"
    at: tuple[int, ...]  # on the leading axes of the stacked arrays
    kind: str  # sublayer kind; "start" for a residual block
    number: int  # of the sublayer or block, from 0


def sublayer_kinds(model: Model) -> tuple[str, ...]:
    """Kinds of the 2 L sublayers, in order."""
    pairs = zip(attention_kinds(model), ffn_kinds(model), strict=True)
    return tuple(kind for pair in pairs for kind in pair)


def block_sublayers(model: Model) -> int:
    """Sublayers in a residual block."""
    return round(2 * model.residual.block_size)


def num_blocks(model: Model) -> int:
    return -(-2 * model.num_layers // block_sublayers(model))


def plan(model: Model) -> tuple[Stage, ...]:
    """The stages of a model, shortest description first found greedily."""
    kinds, size = sublayer_kinds(model), block_sublayers(model)
    whole_layers = size % 2 == 0
    blocks = [
        _fold_block(kinds[start : start + size], whole_layers)
        for start in range(0, len(kinds), size)
    ]
    return tuple(Stage(tuple(body), repeats) for body, repeats in _fold(blocks))


def _fold_block(kinds: Sequence[str], whole_layers: bool) -> Block:
    step = 2 if whole_layers else 1
    items = [tuple(kinds[i : i + step]) for i in range(0, len(kinds), step)]
    return tuple(
        Run(tuple(kind for item in unit for kind in item), repeats)
        for unit, repeats in _fold(items)
    )


def _fold(items: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """Cut `items` into (unit, repeats); each time the repeat that covers most."""
    folded, start = [], 0
    while start < len(items):
        best = (1, 1)  # unit length, repeats
        for length in range(1, (len(items) - start) // 2 + 1):
            unit, repeats = items[start : start + length], 1
            while (
                items[start + repeats * length : start + (repeats + 1) * length] == unit
            ):
                repeats += 1
            if repeats > 1 and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        folded.append((list(items[start : start + length]), repeats))
        start += length * repeats
    return folded


def stage_name(index: int) -> str:
    return f"stage_{index}"


def run_name(block: int, run: int) -> str:
    return f"block_{block}_run_{run}"


def sublayer_name(position: int) -> str:
    return f"sublayer_{position}"


def start_name(block: int) -> str:
    return f"block_{block}_start"


def places(stages: Sequence[Stage]) -> Iterator[Place]:
    """Every block start and sublayer of the model, in the order of the forward pass."""
    sublayer = block = 0
    for s, stage in enumerate(stages):
        for outer in range(stage.repeats):
            for b, runs in enumerate(stage.blocks):
                path = f"{stage_name(s)}/{start_name(b)}"
                name = f"block_{block:03d}/start"
                yield Place(name, path, (outer,), "start", block)
                block += 1
                for r, run in enumerate(runs):
                    for inner in range(run.repeats):
                        for position, kind in enumerate(run.unit):
                            part = ("attention", "ffn")[sublayer % 2]
                            name = f"layer_{sublayer // 2:03d}/{part}"
                            path = "/".join(
                                (stage_name(s), run_name(b, r), sublayer_name(position))
                            )
                            yield Place(name, path, (outer, inner), kind, sublayer)
                            sublayer += 1
