"""Batches by step: `source[step]` is a pure function of the text, the seed and step.

A checkpoint therefore needs only the step to continue with exactly the batches that
an uninterrupted run would have seen. grain reads ahead in a thread (`iterate`);
without grain the same batches are made in the loop itself.

    data = load_data(path, ...)         text, tokens, split, and their figures
    for batch in iterate(data.train, start_step, stop_step): ...
    for batch in iterate(data.validation, 0, len(data.validation)): ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from kimi_jax.data.corpus import load_corpus, split_documents
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.windows import (
    Batch,
    join_documents,
    num_windows,
    packed_window,
    padding_window,
    permute,
)


class Source(Protocol):
    """Anything with a batch for every step."""

    def __getitem__(self, step: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class TrainBatches:
    """Shuffled batches without end: `self[step]` for any step >= 0.

    Windows are dealt out epoch after epoch, each in an order of its own; a batch may
    hold the end of one epoch and the start of the next. A batch is a dict of
    [batch_size, length] arrays: see `packed_window`.

    Raises:
      ValueError: a size below 1, a negative seed, or a batch larger than an epoch.
    """

    stream_N: np.ndarray
    batch_size: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        _check_sizes(self.batch_size, self.length)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}, expected 0 or more")
        if self.batch_size > self.num_windows:
            raise ValueError(
                f"batch_size={self.batch_size} rows of seq_len={self.length} tokens, "
                f"but the {len(self.stream_N):,} training tokens fill only "
                f"{self.num_windows} rows; lower config.train.batch_size to "
                f"{self.num_windows}, lower config.train.seq_len, or add text"
            )

    @property
    def num_windows(self) -> int:
        """Windows an epoch."""
        return num_windows(self.stream_N, self.length)

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step}, expected 0 or more")
        size = self.num_windows
        # Without the offset of the first epoch a late step would not fit in int64.
        epoch, first = divmod(step * self.batch_size, size)
        order_B = first + np.arange(self.batch_size)
        windows_B = np.where(
            order_B < size,
            permute(order_B % size, size, self.seed, epoch),
            permute(order_B % size, size, self.seed, epoch + 1),
        )
        return _stack([packed_window(self.stream_N, i, self.length) for i in windows_B])


@dataclasses.dataclass(frozen=True)
class EvalBatches:
    """Batches in reading order, each window once; the last batch is filled up.

    Filling rows are padding: segment 0, weight 0. With `max_batches` below the number
    of batches, that many windows are taken at even distances over the whole text.

    Raises:
      ValueError: a size below 1.
    """

    stream_N: np.ndarray
    batch_size: int
    length: int
    max_batches: int

    def __post_init__(self) -> None:
        _check_sizes(self.batch_size, self.length, self.max_batches)

    @property
    def windows(self) -> np.ndarray:
        """Indices of the windows that are read, ascending."""
        available = num_windows(self.stream_N, self.length)
        used = min(available, self.max_batches * self.batch_size)
        return np.arange(used) * available // used

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < len(self):
            raise IndexError(f"batch {step} of {len(self)}; indices count from 0")
        chosen = self.windows[step * self.batch_size :][: self.batch_size]
        rows = [packed_window(self.stream_N, i, self.length) for i in chosen]
        rows += [padding_window(self.length)] * (self.batch_size - len(rows))
        return _stack(rows)


class Data(NamedTuple):
    """A corpus made ready for training."""

    train: TrainBatches
    validation: EvalBatches
    tokenizer: ByteTokenizer
    summary: dict[str, str | int | float]


def load_data(
    path: str,
    *,
    validation_fraction: float,
    seed: int,
    batch_size: int,
    length: int,
    steps: int,
    eval_batches: int,
) -> Data:
    """Reads, splits and tokenizes a corpus.

    Args:
      path: see `load_corpus`; "" is the default corpus.
      validation_fraction: share of the documents held out.
      seed: of the split and of the order.
      batch_size: rows a batch, for training and evaluation.
      length: T, tokens a row.
      steps: of the whole run; only for the number of epochs in the summary.
      eval_batches: most batches that one evaluation reads.

    Returns:
      Batches, tokenizer, and a summary for people: source, documents, skipped,
      train_tokens, validation_tokens, windows (of training, an epoch), epochs (in
      `steps`), unigram_bits_per_byte (of the validation text).

    Raises:
      ValueError: see `load_corpus`, `split_documents`, `TrainBatches`.
    """
    corpus = load_corpus(path)
    split = split_documents(corpus.documents, validation_fraction, seed)
    tokenizer = ByteTokenizer()
    train_N = join_documents(split.train, tokenizer)
    validation_N = join_documents(split.validation, tokenizer)
    train = TrainBatches(train_N, batch_size, length, seed)
    validation = EvalBatches(validation_N, batch_size, length, eval_batches)
    summary: dict[str, str | int | float] = {
        "source": corpus.source,
        "documents": len(corpus.documents),
        "skipped": corpus.skipped,
        "train_tokens": len(train_N),
        "validation_tokens": len(validation_N),
        "windows": train.num_windows,
        "epochs": steps * batch_size / train.num_windows,
        "unigram_bits_per_byte": unigram_entropy(validation_N),
    }
    return Data(train, validation, tokenizer, summary)


def unigram_entropy(stream_N: np.ndarray) -> float:
    """Entropy of the byte frequencies, in bits a byte; specials do not count.

    What a model reaches that knows how often each byte occurs and nothing else.
    """
    counts_W = np.bincount(stream_N)[:256]
    p_W = counts_W[counts_W > 0] / counts_W.sum()
    return float(-(p_W * np.log2(p_W)).sum())


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


def _check_sizes(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ValueError(
            f"batch_size, length and max_batches are {sizes}, expected 1 or more each"
        )


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
