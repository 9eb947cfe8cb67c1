"""Windows of expert episodes: whole episodes side by side, loss on the policy's turns.

    tokens       <bos> ... <assistant> s a y ...  <bos> ...
    targets      ...                 s a y <end>  ...
    weights      0     ... 1         1 1 1        0
    segment_ids  1     ... 1         1 1 1        2

A source is "episodes:SPEC" with the spec of an environment; lists in it are dealt out
in turn, episode by episode. Two dials are of the source alone: `skill`, the share of
episodes that end well, and `noise`, the chance of a wrong turn before each right one.
An episode that its noise makes longer than a row is played without.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kimi_jax.data.generated import write_piece
from kimi_jax.data.task_windows import refuse_longer
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.data.windows import Batch
from kimi_jax.environments import specs
from kimi_jax.environments.environment import seed_of
from kimi_jax.environments.episodes import Episode, expert_episode
from kimi_jax.environments.format import Format, make_format
from kimi_jax.errors import UserError
from kimi_jax.tasks.example import Stream
from kimi_jax.tasks.specs import Spec

PREFIX = "episodes:"
_EXPERT = {"skill": 1.0, "noise": 0.0}


class Cell(NamedTuple):
    """One environment with its dials, and how good the expert is."""

    spec: Spec
    skill: float
    noise: float

    @property
    def length(self) -> int:
        """Most tokens of an episode."""
        return int(self.spec.dials["length"])

    def episode(self, form: Format, seed: int, most: int) -> Episode:
        """The episode of a seed, of at most `most` tokens."""
        task = specs.task_of(self.spec, seed)
        # A fresh environment, for rows are made in several threads.
        environment = specs.build(self.spec, form)
        made = expert_episode(environment, task, noise=self.noise, skill=self.skill)
        if len(made.tokens) > most:
            made = expert_episode(environment, task)
        return made


@dataclasses.dataclass(frozen=True)
class EpisodeRows:
    """Rows of episodes, see `generated.Rows`."""

    cells: tuple[Cell, ...]
    form: Format

    def fill(
        self, batch: Batch, row: int, seed: int, stream: Stream, number: int
    ) -> None:
        at, room = 0, batch["tokens"].shape[1]
        for count in itertools.count():
            cell = self.cells[(number + count) % len(self.cells)]
            seed_E = seed_of(stream, seed, number, count)
            episode = cell.episode(self.form, seed_E, room + 1)
            tokens, mask_N = episode.tokens, episode.policy_mask
            if at + len(tokens) - 1 > room:
                return
            columns = tokens[:-1], tokens[1:], mask_N[1:]
            write_piece(batch, row, at, 1 + count, columns)
            at += len(tokens) - 1

    def stretched(self, numerator: int, denominator: int) -> EpisodeRows:
        cells = []
        for cell in self.cells:
            dials = {
                **cell.spec.dials,
                "length": cell.length * numerator // denominator,
            }
            cells.append(cell._replace(spec=cell.spec._replace(dials=dials)))
        return EpisodeRows(tuple(cells), self.form)


def make_episodes(
    sources: Sequence[str], tokenizer: Tokenizer, seq_len: int
) -> dict[str, EpisodeRows]:
    """Rows of "episodes:SPEC" sources, by spec; `length` is `seq_len` if not given.

    Raises:
      UserError: a spec is wrong, its episodes are longer than a row, the tokenizer has
        no tokens for roles, or the environment has no mistakes to make.
    """
    form = make_format(tokenizer)
    made = {}
    for source in sources:
        text = source.removeprefix(PREFIX)
        try:
            cells = [
                _cell(spec, seq_len)
                for spec in specs.parse(text, dict.fromkeys(_EXPERT, float))
            ]
            for cell in cells:
                specs.make(cell.spec, form)
                cell.episode(form, 0, cell.length)
        except UserError as error:
            raise UserError(f"config.data.sources={source!r}: {error}") from error
        refuse_longer(source, max(cell.length for cell in cells), seq_len)
        made[text] = EpisodeRows(tuple(cells), form)
    return made


def _cell(spec: Spec, seq_len: int) -> Cell:
    expert = {name: spec.dials.get(name, value) for name, value in _EXPERT.items()}
    dials = {k: v for k, v in spec.dials.items() if k not in _EXPERT}
    return Cell(Spec(spec.name, {"length": seq_len, **dials}), **expert)
