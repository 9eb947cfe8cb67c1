"""Batches by step: `source[step]` is a pure function of the text, the config and step.

A checkpoint therefore needs only the step to continue with exactly the batches that
an uninterrupted run would have seen, on any number of hosts: each reads its own rows.
grain reads ahead in a thread (`iterate`); without grain the same batches are made in
the loop itself.

    data = make_data(stores, ...)       split, packing, mixture, and their figures
    data = make_generated_data(...)     the same of generated tasks or episodes
    for batch in iterate(data.train, start_step, stop_step): ...
    for batch in iterate(Reader(data.train, 1, 4), start_step, stop_step): ...
    for batch in iterate(data.validation, 0, len(data.validation)): ...
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from kimi_jax.config import Config
from kimi_jax.data import mixture, statistics
from kimi_jax.data.build_store import Progress, prepare_store
from kimi_jax.data.documents import Documents, Split, TokenStore, hold_out
from kimi_jax.data.episode_windows import make_episodes
from kimi_jax.data.generated import EvalGenerated, GeneratedWindows, Rows, is_generated
from kimi_jax.data.haystacks import load_haystack
from kimi_jax.data.media import NO_ROOM, MediaStore, Room
from kimi_jax.data.media_sources import is_media, load_store, room_of
from kimi_jax.data.parts import make_cells, make_pools
from kimi_jax.data.permutation import permute
from kimi_jax.data.store import check_vocabulary
from kimi_jax.data.task_windows import make_tasks
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.data.windows import (
    Batch,
    Pool,
    Windows,
    check_batch,
    pack,
    padding_batch,
    share_of,
)
from kimi_jax.tasks.example import Stream
from kimi_jax.tasks.text import Text

UNIGRAM_TOKENS = 2**22


class Source(Protocol):
    """Anything with a batch for every step."""

    def __getitem__(self, step: int) -> Batch: ...


class SharedSource(Protocol):
    """A source whose batches can be made in shares of rows, by any number of hosts."""

    def rows(self, step: int, reader: int, readers: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Reader:
    """The rows that reader `reader` of `readers` makes of every batch of `source`.

    The readers' rows, joined in their order, are the batch, whatever their number.
    """

    source: SharedSource
    reader: int
    readers: int

    def __getitem__(self, step: int) -> Batch:
        return self.source.rows(step, self.reader, self.readers)


@dataclasses.dataclass(frozen=True)
class TrainBatches:
    """Shuffled batches without end: `self[step]` for any step >= 0.

    `schedule` says which part each row comes from. The windows of a part are dealt out
    epoch after epoch, each in an order of its own: its k-th row is window
    permute(k mod n, n, seed, k div n, part) of its n. A batch is a dict of
    [batch_size, T] arrays: see `padding_batch`.

    Args:
      parts: the windows of each part, all of one length.

    Raises:
      ValueError: a size below 1, a negative seed, or a batch larger than an epoch.
    """

    parts: tuple[Windows, ...]
    schedule: mixture.Schedule
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        _check_sizes(self.batch_size, self.parts[0].length)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}, expected 0 or more")
        if self.batch_size > self.windows:
            raise ValueError(
                f"batch_size={self.batch_size} rows of "
                f"seq_len={self.parts[0].length} tokens, but the training text fills "
                f"only {self.windows} rows; lower config.train.batch_size to "
                f"{self.windows}, lower config.train.seq_len, or add text"
            )

    @property
    def windows(self) -> int:
        """Windows of all parts together."""
        return sum(pool.windows for pool in self.parts)

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, 1)

    def rows(self, step: int, reader: int, readers: int) -> Batch:
        """The rows of batch `step` that are `reader`'s, [batch_size / readers, T].

        Raises:
          IndexError: the step is negative.
          ValueError: the rows cannot be dealt out evenly, or there is no such reader.
        """
        if step < 0:
            raise IndexError(f"step {step}, expected 0 or more")
        mine = share_of(self.batch_size, reader, readers)
        index_B = step * self.batch_size + np.arange(mine.start, mine.stop)
        part_B, count_B = self.schedule.rows(index_B, self.seed)
        first = self.parts[0]
        batch = padding_batch(len(index_B), first.length, first.pad, first.room)
        for part in np.unique(part_B).tolist():
            row_B = np.flatnonzero(part_B == part)
            self.parts[part].write(batch, row_B, self._windows(part, count_B[row_B]))
        return batch

    def _windows(self, part: int, count_B: np.ndarray) -> np.ndarray:
        """The windows that a part gives for its rows number `count_B`."""
        size = self.parts[part].windows
        epoch_B, place_B = np.divmod(count_B, size)
        window_B = np.empty_like(place_B)
        for epoch in np.unique(epoch_B).tolist():
            mine = epoch_B == epoch
            window_B[mine] = permute(place_B[mine], size, self.seed, epoch, part)
        return window_B


@dataclasses.dataclass(frozen=True)
class EvalBatches:
    """Batches in reading order, each window once; the last batch is filled up.

    The documents of all sources are joined and split, however training packs them, so
    that the losses of runs that pack differently can be compared. Filling rows are
    padding: segment 0, weight 0. With `max_batches` below the number of batches, that
    many windows are taken at even distances over the whole text.

    Raises:
      ValueError: a size below 1.
    """

    sources: tuple[Documents, ...]
    batch_size: int
    length: int
    max_batches: int
    pad: int
    room: Room = NO_ROOM
    graded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_sizes(self.batch_size, self.length, self.max_batches)

    @functools.cached_property
    def pool(self) -> Pool:
        """All windows of the held-out text."""
        packed = (pack(s, self.length, "split", self.room) for s in self.sources)
        return Pool(tuple(packed), self.length, self.pad, self.room)

    @functools.cached_property
    def windows(self) -> np.ndarray:
        """Indices of the windows that are read, ascending."""
        available = self.pool.windows
        used = min(available, self.max_batches * self.batch_size)
        return np.arange(used) * available // used

    def at(self, length: int, batch_size: int) -> EvalBatches:
        """The same text in windows of another length, such as a multiple of this."""
        room = self.room._replace(
            patches=self.room.patches * length // self.length,
            items=self.room.items * length // self.length,
        )
        return dataclasses.replace(
            self, length=length, batch_size=batch_size, room=room
        )

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, 1)

    def rows(self, step: int, reader: int, readers: int) -> Batch:
        """The rows of batch `step` that are `reader`'s, [batch_size / readers, T].

        Raises:
          IndexError: there is no such batch.
          ValueError: the rows cannot be dealt out evenly, or there is no such reader.
        """
        check_batch(step, len(self))
        mine = share_of(self.batch_size, reader, readers)
        chosen = self.windows[step * self.batch_size :][: self.batch_size]
        return self.pool.read(chosen[mine.start : mine.stop], len(mine))


class HeldOut(SharedSource, Source, Protocol):
    """What validation reads: `EvalBatches`, or `generated.EvalGenerated`."""

    @property
    def length(self) -> int:
        """Tokens a row."""

    @property
    def graded(self) -> bool:
        """Targets are answers, so that it is worth counting those that are right."""

    def at(self, length: int, batch_size: int) -> HeldOut: ...

    def __len__(self) -> int: ...


class Data(NamedTuple):
    """Text or tasks made ready for training."""

    train: TrainBatches
    validation: HeldOut
    tokenizer: Tokenizer
    identity: dict[str, str]  # equal for a run that may go on with this text
    summary: dict[str, str | int | float]
    statistics: list[statistics.Statistics]


def load_data(
    cfg: Config,
    folder: pathlib.Path,
    progress: Callable[[str], Callable[[Progress], None]] | None = None,
) -> Data:
    """`make_data` of the sources in `cfg.data`, tokenised into `folder` where needed.

    Args:
      folder: source i becomes the token store `folder`/0i, unless it is one.
      progress: of a source's name, gives what is told how far tokenising has come.

    Raises:
      UserError: a source or the tokenizer cannot be read, the vocabulary is small, or
        a task cannot be made.
      ValueError: see `make_data`.
    """
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    check_vocabulary(tokenizer, cfg.model.vocab_size)
    if any(map(is_generated, cfg.data.sources)):
        return make_generated_data(tokenizer, cfg)
    stores: list[TokenStore] = [
        load_store(source, tokenizer, cfg)
        if is_media(source)
        else prepare_store(
            source,
            tokenizer,
            folder / f"{number:02}",
            progress=progress and progress(source),
        )
        for number, source in enumerate(cfg.data.sources)
    ]
    return make_data(stores, tokenizer, cfg)


def make_data(stores: Sequence[TokenStore], tokenizer: Tokenizer, cfg: Config) -> Data:
    """Splits, packs and mixes the documents of `stores`.

    Args:
      stores: one a source, in the order of the weights in `cfg.data.mixture`.
      tokenizer: the one that made the stores.

    Returns:
      Batches, tokenizer, digests, the statistics of every cell, and a summary:
      documents, train_tokens, validation_tokens, windows (of training, an epoch),
      epochs (in the run, over all text), unigram_bits_per_byte (of the validation
      text).

    Raises:
      ValueError: see `hold_out`, `make_pools`, `make_schedule`, `TrainBatches`; or the
        mixture has another number of weights than there are sources.
    """
    data, train = cfg.data, cfg.train
    _check_mixture(data.mixture, len(stores))
    splits = [_hold_out(store, cfg) for store in stores]
    names = [store.title for store in stores]
    room = room_of(cfg)
    cells = make_cells([s.train for s in splits], names, data, train.seq_len, room)
    phases = mixture.combine(data.mixture, data.strata_mixture)
    run_rows = train.steps * train.batch_size
    schedule = mixture.make_schedule(phases, run_rows)
    pools = make_pools(cells, phases, train.seq_len, tokenizer.pad, room)
    batches = TrainBatches(pools, schedule, train.batch_size, data.seed)
    validation = EvalBatches(
        tuple(split.validation for split in splits),
        train.batch_size,
        train.seq_len,
        train.eval_batches,
        tokenizer.pad,
        room,
    )
    train_N, validation_N = (
        sum(int(side.sizes_D.sum()) for side in sides)
        for sides in zip(*splits, strict=True)
    )
    summary: dict[str, str | int | float] = {
        "source": ", ".join(names),
        "documents": sum(store.documents for store in stores),
        "train_tokens": train_N,
        "validation_tokens": validation_N,
        "windows": batches.windows,
        "epochs": run_rows / batches.windows,
        "unigram_bits_per_byte": unigram_entropy(validation, tokenizer.bytes_per_token),
    }
    figures = statistics.measure(cells, schedule, run_rows, train.seq_len)
    identity = {f"source {i}": store.digest for i, store in enumerate(stores)}
    identity["tokenizer"] = tokenizer.fingerprint
    return Data(batches, validation, tokenizer, identity, summary, figures)


def _hold_out(store: TokenStore, cfg: Config) -> Split:
    split = hold_out(store, cfg.data.validation_fraction, cfg.data.seed)
    if not isinstance(store, MediaStore):
        return split
    return Split(*(side._replace(media=store) for side in split))


def make_generated_data(tokenizer: Tokenizer, cfg: Config) -> Data:
    """Generated tasks, or expert episodes, in place of text: rows without end.

    Rows to train on and to validate on come from streams of their own.
    `cfg.data.mixture` says how often each source comes; empty: equally often.

    Raises:
      UserError: see `make_tasks` and `make_episodes`.
      ValueError: the mixture has another number of weights than there are sources.
    """
    data, train = cfg.data, cfg.train
    made: dict[str, Rows]
    identity = {"tokenizer": tokenizer.fingerprint}
    if data.sources[0].startswith("task:"):
        text = Text(tokenizer, load_haystack(data.haystack))
        made = {**make_tasks(data.sources, text, train.seq_len)}
        identity["haystack"] = text.haystack.digest
    else:
        made = {**make_episodes(data.sources, tokenizer, train.seq_len)}
    _check_mixture(data.mixture, len(made))
    all_rows, room = tuple(made.values()), room_of(cfg)

    def windows(sources: Sequence[Rows], stream: Stream) -> GeneratedWindows:
        row = train.seq_len, tokenizer.pad, room
        return GeneratedWindows(tuple(sources), *row, data.seed, stream)

    parts = tuple(windows((rows,), "training") for rows in all_rows)
    phases = mixture.combine(data.mixture or ((0.0, *[1.0] * len(parts)),), ())
    schedule = mixture.make_schedule(phases, train.steps * train.batch_size)
    batches = TrainBatches(parts, schedule, train.batch_size, data.seed)
    held_out = windows(all_rows, "validation")
    validation = EvalGenerated(held_out, train.batch_size, train.eval_batches)
    bytes_W = tokenizer.bytes_per_token
    summary: dict[str, str | int | float] = {
        "source": ", ".join(made),
        "unigram_bits_per_byte": _entropy(
            (validation[i] for i in range(len(validation))), bytes_W
        ),
    }
    identity |= {f"source {i}": name for i, name in enumerate(made)}
    return Data(batches, validation, tokenizer, identity, summary, [])


def unigram_entropy(source: EvalBatches, bytes_W: np.ndarray) -> float:
    """Entropy of the token frequencies, in bits a byte; specials do not count.

    What a model reaches that knows how often each token occurs and nothing else. At
    most 4M tokens are counted, in windows at even distances.

    Args:
      bytes_W: bytes of text that each token stands for; 0 for specials.

    Raises:
      ValueError: the text is empty.
    """
    most = max(1, UNIGRAM_TOKENS // (64 * source.length))
    text = dataclasses.replace(source, batch_size=64, max_batches=most)
    pool = dataclasses.replace(text.pool, room=NO_ROOM)  # decodes no image
    groups = (text.windows[at : at + 64] for at in range(0, len(text.windows), 64))
    return _entropy((pool.read(index_B, len(index_B)) for index_B in groups), bytes_W)


def _entropy(batches: Iterable[Batch], bytes_W: np.ndarray) -> float:
    counts_W = np.zeros(len(bytes_W), np.int64)
    for batch in batches:
        targets_N = batch["targets"][batch["weights"] > 0]
        counts_W += np.bincount(targets_N, minlength=len(bytes_W))
    counts_W[bytes_W == 0] = 0
    if not counts_W.any():
        raise ValueError(
            "the documents held out for validation are empty; raise "
            "config.data.validation_fraction or add text"
        )
    seen_W = counts_W > 0
    p_W = counts_W[seen_W] / counts_W.sum()
    return float(-(p_W * np.log2(p_W)).sum() / (p_W * bytes_W[seen_W]).sum())


def iterate(
    source: Source, start: int, stop: int, *, read_ahead: int = 2
) -> Iterator[Batch]:
    """Yields source[start], ..., source[stop - 1], made `read_ahead` batches early.

    grain's thread makes the batches while the device computes. With read_ahead=0, or
    where grain is not installed, they are made on demand; the numbers are the same.
    """
    try:
        import grain
    except ImportError:
        read_ahead = 0
    if not read_ahead:
        for step in range(start, stop):
            yield source[step]
        return
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=read_ahead)
    steps = grain.MapDataset.range(start, stop)
    yield from steps.map(source.__getitem__).to_iter_dataset(options)


def _check_mixture(rows: mixture.Rows, sources: int) -> None:
    if rows and len(rows[0]) != 1 + sources:
        raise ValueError(
            f"config.data.mixture has {len(rows[0]) - 1} weights in a row for "
            f"{sources} sources; write (fraction, one weight for each source)"
        )


def _check_sizes(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ValueError(
            f"batch_size, length and max_batches are {sizes}, expected 1 or more each"
        )
