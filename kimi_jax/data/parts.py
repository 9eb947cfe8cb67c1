"""From sources to the parts of a mixture.

A cell is the documents of one source in one stratum of lengths. Cells are packed apart,
so a window holds text of one cell. A part has a weight of its own: where no weights
tell cells apart, they are pooled and read in their natural share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kimi_jax.config import Data
from kimi_jax.data.documents import Documents, by_length, stratum_name
from kimi_jax.data.media import NO_ROOM, Room
from kimi_jax.data.mixture import Phase
from kimi_jax.data.windows import Packed, Pool, pack


class Cell(NamedTuple):
    """Documents of one source and stratum, and the windows made of them."""

    source: str  # name, for people
    stratum: str  # such as "512 to 4,095 tokens"
    part: int
    documents: Documents
    packed: Packed

    @property
    def name(self) -> str:
        return f"{self.source}, {self.stratum}"


def make_cells(
    sources: Sequence[Documents],
    names: Sequence[str],
    data: Data,
    length: int,
    room: Room = NO_ROOM,
) -> list[Cell]:
    """Cells in the order of sources, then strata; some may be empty."""
    cells = []
    for source, (documents, name) in enumerate(zip(sources, names, strict=True)):
        for stratum, members in enumerate(by_length(documents, data.strata)):
            part = part_of(source, stratum, data)
            packed = pack(members, length, data.packing, room)
            label = stratum_name(data.strata, stratum)
            cells.append(Cell(name, label, part, members, packed))
    return cells


def part_of(source: int, stratum: int, data: Data) -> int:
    """The part of a source and stratum, numbered as by `mixture.combine`."""
    columns = len(data.strata) + 1 if data.strata_mixture else 1
    row = source if data.mixture else 0
    return row * columns + (stratum if data.strata_mixture else 0)


def make_pools(
    cells: Sequence[Cell],
    phases: Sequence[Phase],
    length: int,
    pad: int,
    room: Room = NO_ROOM,
) -> tuple[Pool, ...]:
    """The windows of each part.

    Raises:
      ValueError: a part has a weight in some phase and no text.
    """
    pools = []
    for part in range(len(phases[0].weights_P)):
        members = [cell for cell in cells if cell.part == part]
        pool = Pool(tuple(cell.packed for cell in members), length, pad, room)
        weight = max(float(phase.weights_P[part]) for phase in phases)
        if weight and not pool.windows:
            names = " / ".join(cell.name for cell in members)
            raise ValueError(
                f"config.data.mixture, strata_mixture: {names!r} has a share of "
                f"{weight:.2g} and no training documents; set its weight to 0, move "
                "the boundaries of config.data.strata, or add text"
            )
        pools.append(pool)
    return tuple(pools)
