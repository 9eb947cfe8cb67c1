"""What a run is about to read: the figures of each cell of the data, before it starts.

`measure` gives plain values (JSON-ready through `_asdict`), the rest of the file turns
them into rows and warnings for the first screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.data.documents import Documents
from kimi_jax.data.mixture import Schedule
from kimi_jax.data.packing import Pieces
from kimi_jax.data.parts import Cell

MOST_PADDING = 0.05


class Statistics(NamedTuple):
    """Figures of one cell; shares are in [0, 1]."""

    source: str
    stratum: str
    documents: int
    tokens: int  # <bos> and <eod> included
    windows: int  # rows an epoch
    share: float  # of the rows of the run
    epochs: float  # in the run
    padding: float  # share of positions without text
    cut: float  # share of documents that do not lie in one row
    lengths: list[int]  # i: documents of 2^i to 2^(i+1) - 1 tokens


def measure(
    cells: Sequence[Cell], schedule: Schedule, run_rows: int, length: int
) -> list[Statistics]:
    """Statistics of every cell for a run of `run_rows` rows of `length` tokens."""
    part_rows_P = schedule.planned(run_rows)
    part_windows_P = np.zeros(schedule.parts)
    for cell in cells:
        part_windows_P[cell.part] += cell.packed.pieces.windows
    found = []
    for cell in cells:
        pieces, sizes_D = cell.packed.pieces, cell.documents.sizes_D
        rows = part_rows_P[cell.part]
        epochs = float(rows / max(1, part_windows_P[cell.part]))
        found.append(
            Statistics(
                source=cell.source,
                stratum=cell.stratum,
                documents=len(sizes_D),
                tokens=int(sizes_D.sum()),
                windows=pieces.windows,
                share=epochs * pieces.windows / run_rows,
                epochs=epochs if pieces.windows else 0.0,
                padding=pieces.padding(length),
                cut=cut_documents(cell.documents, pieces) / max(1, len(sizes_D)),
                lengths=length_histogram(sizes_D),
            )
        )
    return found


def cut_documents(documents: Documents, pieces: Pieces) -> int:
    """How many documents are more than one piece."""
    owner_P = np.searchsorted(documents.start_D, pieces.start_P, side="right") - 1
    continues_P = pieces.start_P != documents.start_D[owner_P]
    return len(np.unique(owner_P[continues_P]))


def length_histogram(sizes_D: np.ndarray) -> list[int]:
    """Entry i counts sizes of 2^i to 2^(i+1) - 1, up to the longest."""
    # frexp is exact, where log2 rounds: size = m 2^e with 1/2 <= m < 1.
    return np.bincount(np.frexp(sizes_D.astype(float))[1] - 1).tolist()


def total_padding(statistics: Sequence[Statistics]) -> float:
    """Share of the positions of the run that hold no text."""
    return sum(cell.share * cell.padding for cell in statistics)


def warnings(statistics: Sequence[Statistics], length: int) -> list[str]:
    """A line if windows of `length` waste more than 5 % of the run's positions."""
    wasted = total_padding(statistics)
    if wasted <= MOST_PADDING:
        return []
    worst = max(statistics, key=lambda cell: cell.share * cell.padding)
    return [
        f"config.train.seq_len={length}: {wasted:.1%} of the positions will be "
        f"padding, most of it in {worst.source}, {worst.stratum} "
        f"({worst.padding:.1%}); another seq_len may fit the documents better, and "
        "config.data.packing=split loses none"
    ]


def summary_rows(statistics: Sequence[Statistics]) -> list[tuple[str | int, ...]]:
    """A table of the cells for the first screen."""
    words = "source stratum documents tokens rows share epochs padding cut"
    rows: list[tuple[str | int, ...]] = [tuple(words.split())]
    for cell in statistics:
        shares = f"{cell.share:.1%}", f"{cell.epochs:.2f}"
        waste = f"{cell.padding:.1%}", f"{cell.cut:.1%}"
        counts = cell.documents, cell.tokens, cell.windows
        rows.append((cell.source, cell.stratum, *counts, *shares, *waste))
    return rows


def short_names(sources: Sequence[str]) -> list[str]:
    """The ends of paths, as short as they differ: columns of full ones are too wide."""
    parts = [source.split("/") for source in sources]
    for depth in range(1, max(map(len, parts))):
        short = ["/".join(part[-depth:]) for part in parts]
        if len(set(short)) == len(sources):
            return short
    return list(sources)


def length_rows(statistics: Sequence[Statistics]) -> list[tuple[str | int, ...]]:
    """A table of document lengths by source: a row for each power of two."""
    longest = max(len(cell.lengths) for cell in statistics)
    counts = {cell.source: np.zeros(longest, int) for cell in statistics}
    for cell in statistics:
        counts[cell.source][: len(cell.lengths)] += np.array(cell.lengths, int)
    counts_SL = np.stack(list(counts.values()))
    first = int(np.argmax(counts_SL.any(axis=0)))
    return [
        ("tokens a document", *short_names(list(counts))),
        *(
            (f"{2**i:,} to {2 ** (i + 1) - 1:,}", *counts_SL[:, i].tolist())
            for i in range(first, longest)
        ),
    ]
