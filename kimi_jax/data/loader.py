"""Batches by step: `source[step]` is a pure function of the text, the seed and step.

A checkpoint therefore needs only the step to continue with exactly the batches that
an uninterrupted run would have seen. grain reads ahead in a thread (`iterate`);
without grain the same batches are made in the loop itself.

    data = load_data(store, ...)        tokens, split, and their figures
    for batch in iterate(data.train, start_step, stop_step): ...
    for batch in iterate(data.validation, 0, len(data.validation)): ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from kimi_jax.data import split
from kimi_jax.data.store import TokenStore
from kimi_jax.data.tokenizer import ByteTokenizer, Tokenizer
from kimi_jax.data.windows import (
    Batch,
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
    tokenizer: Tokenizer
    summary: dict[str, str | int | float]


def load_data(
    store: TokenStore,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float,
    seed: int,
    batch_size: int,
    length: int,
    steps: int,
    eval_batches: int,
) -> Data:
    """Splits the documents of a token store and makes batches of them.

    Args:
      store: written by `tokenizer`.
      tokenizer: the byte tokenizer.
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
      ValueError: see `split_tokens`, `TrainBatches`; windows are packed by the specials
        of the byte tokenizer, so another one is refused.
    """
    if tokenizer.fingerprint != ByteTokenizer.fingerprint:
        raise ValueError(
            f"config.data.tokenizer={tokenizer.name!r}: windows are packed by the byte "
            "tokenizer only; set it to 'bytes'"
        )
    train_N, validation_N = split_tokens(store, validation_fraction, seed)
    train = TrainBatches(train_N, batch_size, length, seed)
    validation = EvalBatches(validation_N, batch_size, length, eval_batches)
    summary: dict[str, str | int | float] = {
        "source": store.meta.title,
        "documents": store.documents,
        "skipped": store.meta.empty,
        "train_tokens": len(train_N),
        "validation_tokens": len(validation_N),
        "windows": train.num_windows,
        "epochs": steps * batch_size / train.num_windows,
        "unigram_bits_per_byte": unigram_entropy(
            validation_N, tokenizer.bytes_per_token
        ),
    }
    return Data(train, validation, tokenizer, summary)


def split_tokens(
    store: TokenStore, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(training stream, validation stream), each of whole documents.

    Documents are held out by `split.held_out`. A store of a single document is cut in
    two, its end being held out.

    Raises:
      ValueError: the fraction is outside (0, 1), or there is too little text to split.
    """
    tokens_N, meta = store.tokens_N, store.meta
    if store.documents > 1:
        held_M = split.held_out(store.documents, validation_fraction, seed)
        held_N = np.repeat(held_M, np.diff(store.offsets_M))
        return tokens_N[~held_N], tokens_N[held_N]
    split.check_fraction(validation_fraction)
    size = len(tokens_N) - 2
    cut = size - round(size * validation_fraction)
    if not 0 < cut < size:
        raise ValueError(
            f"the text is one document of {size} tokens, too short to hold out "
            f"{validation_fraction:.0%}; add text or raise validation_fraction"
        )
    bos, eod = np.array([[meta.bos], [meta.eod]], tokens_N.dtype)
    head_N, tail_N = tokens_N[: cut + 1], tokens_N[cut + 1 :]
    return np.concatenate([head_N, eod]), np.concatenate([bos, tail_N])


def unigram_entropy(stream_N: np.ndarray, bytes_W: np.ndarray) -> float:
    """Entropy of the token frequencies, in bits a byte; specials do not count.

    What a model reaches that knows how often each token occurs and nothing else.

    Args:
      stream_N: ids, integers [N].
      bytes_W: bytes that each token stands for, [vocabulary]; 0: a special.
    """
    counts_W = np.bincount(stream_N, minlength=len(bytes_W)) * (bytes_W > 0)
    counted_W = counts_W > 0
    counts_W, bytes_W = counts_W[counted_W], bytes_W[counted_W]
    bits = -(counts_W * np.log2(counts_W / counts_W.sum())).sum()
    return float(bits / (counts_W * bytes_W).sum())


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
