"""Which part of the data every row of a run comes from, by row number.

A part is text that has a weight of its own. Rows are dealt out in blocks. By the end of
a block each part has had its share of the rows since the weights last changed, to
within one row; inside a block the parts are shuffled. How many rows a part had before
any block is a formula, so no state has to be saved and nothing is replayed to resume.

The formula is cumulative rounding: with c_p the weights of parts 0..p summed, the parts
0..p together have had round(c_p n) of n rows. Differences of neighbours are off by less
than one row and add up to n. Blocks are long enough for two rows of the smallest part,
which is why no difference ever falls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_jax.data.permutation import permute

SMALLEST_BLOCK = 64
LARGEST_BLOCK = 65_536

Rows = Sequence[Sequence[float]]  # a row: from this fraction of the run on, the weights


class Phase(NamedTuple):
    """From this fraction of the run on, these weights, which add up to 1."""

    fraction: float
    weights_P: np.ndarray


def combine(mixture: Rows, strata_mixture: Rows) -> list[Phase]:
    """The phases of two schedules at once: part (i, j) has the product of weights.

    Args:
      mixture, strata_mixture: rows as in the config; empty is one part that is never
        told apart.

    Returns:
      Phases of I * J parts, part (i, j) being number i * J + j.
    """
    tables = [table or ((0.0, 1.0),) for table in (mixture, strata_mixture)]
    fractions = sorted({row[0] for table in tables for row in table})

    def at(table: Rows, fraction: float) -> np.ndarray:
        weights = np.array([row for row in table if row[0] <= fraction][-1][1:])
        return weights / weights.sum()

    return [
        Phase(fraction, np.outer(*(at(table, fraction) for table in tables)).ravel())
        for fraction in fractions
    ]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The part of every row, and how many rows of that part came before it."""

    block_rows: int
    first_block_F: np.ndarray  # int64: where each phase begins
    cumulative_FP: np.ndarray  # float64: weights of parts 0..p; ends with 1
    before_FP: np.ndarray  # int64: rows that each part had before the phase

    @property
    def parts(self) -> int:
        return self.cumulative_FP.shape[1]

    def phase_of(self, block: int) -> int:
        return int(np.searchsorted(self.first_block_F, block, side="right")) - 1

    def before(self, block: int) -> np.ndarray:
        """Rows that each part has had before `block`, int64 [P]."""
        phase = self.phase_of(block)
        rows = (block - int(self.first_block_F[phase])) * self.block_rows
        return self.before_FP[phase] + _quotas(self.cumulative_FP[phase], rows)

    def planned(self, run_rows: int) -> np.ndarray:
        """Each part's share of the first `run_rows` rows, in rows, float64 [P]."""
        starts_F = np.minimum(self.first_block_F * self.block_rows, run_rows)
        rows_F = np.diff(starts_F, append=run_rows)
        return rows_F @ np.diff(self.cumulative_FP, axis=1, prepend=0.0)

    def draw(self, block: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each row of a block, and its number among that part's rows.

        Returns:
          part_R, count_R: int64 [block_rows]; the k-th row that a run takes from a part
          has count k, from 0.
        """
        phase = self.phase_of(block)
        done = (block - int(self.first_block_F[phase])) * self.block_rows
        before_P, after_P = (
            _quotas(self.cumulative_FP[phase], rows)
            for rows in (done, done + self.block_rows)
        )
        quota_P = after_P - before_P
        slots_R = np.repeat(np.arange(self.parts), quota_P)
        # Parts shuffle their windows with keys that end in 0..parts-1.
        key = seed, block, self.parts
        part_R = slots_R[permute(np.arange(self.block_rows), self.block_rows, *key)]
        count_R = np.empty_like(part_R)
        # Sorted by part, rows keep their order in time.
        count_R[np.argsort(part_R, kind="stable")] = np.arange(
            self.block_rows
        ) + np.repeat(
            self.before_FP[phase] + before_P - (np.cumsum(quota_P) - quota_P), quota_P
        )
        return part_R, count_R

    def rows(self, index_B: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """`draw` for row numbers, int64 [B], counted from the start of the run."""
        block_B, place_B = np.divmod(index_B, self.block_rows)
        part_B, count_B = np.empty((2, len(index_B)), np.int64)
        for block in np.unique(block_B).tolist():
            mine = block_B == block
            part_R, count_R = self.draw(block, seed)
            part_B[mine], count_B[mine] = part_R[place_B[mine]], count_R[place_B[mine]]
        return part_B, count_B


def make_schedule(phases: Sequence[Phase], run_rows: int) -> Schedule:
    """A schedule for a run of `run_rows` rows; the last phase goes on for ever.

    Phases begin at the multiple of the block that is nearest to their fraction.

    Raises:
      ValueError: a weight is so small that blocks would be too long to shuffle.
    """
    weights_FP = np.stack([phase.weights_P for phase in phases])
    smallest = float(weights_FP[weights_FP > 0].min())
    if smallest * LARGEST_BLOCK < 2:
        raise ValueError(
            f"config.data.mixture and strata_mixture: a part has a share of "
            f"{smallest:.2g}, allowed are 0 and {2 / LARGEST_BLOCK:.2g} or more; set "
            "its weight to 0 or raise it"
        )
    block_rows = SMALLEST_BLOCK
    while smallest * block_rows < 2:
        block_rows *= 2
    first_block_F = np.array(
        [round(phase.fraction * run_rows / block_rows) for phase in phases], np.int64
    )
    cumulative_FP = np.cumsum(weights_FP, axis=1)
    # Exactly 1 at the last part with weight and after it.
    cumulative_FP /= cumulative_FP[:, -1:]
    before_FP = np.zeros(weights_FP.shape, np.int64)
    for phase in range(1, len(phases)):
        rows = int(first_block_F[phase] - first_block_F[phase - 1]) * block_rows
        before_FP[phase] = before_FP[phase - 1] + _quotas(
            cumulative_FP[phase - 1], rows
        )
    return Schedule(block_rows, first_block_F, cumulative_FP, before_FP)


def _quotas(cumulative_P: np.ndarray, rows: int) -> np.ndarray:
    """Rows of each part after `rows` rows: less than one away from its share of them.

    A part of weight zero adds nothing to the sum before it, so it gets exactly none.
    """
    until_P = np.floor(cumulative_P * rows + 0.5).astype(np.int64)
    return np.diff(until_P, prepend=0)
