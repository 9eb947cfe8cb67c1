"""Answers scored by forward passes over the whole instance, true answers included.

A label counts as right if the model finds it likeliest, given all that comes before.
For answers that are written (`tasks.example`), all labels being right is the same as
greedy generation writing exactly the answers: by induction over the labels, what was
generated so far is what the pass has read. Partial credit differs: a generation goes on
from its own mistakes, a pass from the truth.

What is longer than a pass may be is read in chunks through the cache of generation, so
that memory beyond the cache does not grow with length.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kimi_jax import config, sharding
from kimi_jax.modules import transformer
from kimi_jax.modules.cache import Cache, init_cache
from kimi_jax.ops.cross_entropy import chunked_cross_entropy, chunked_predictions
from kimi_jax.tasks.example import Example

_CHUNK = 4096  # positions whose logits exist at one time


class Score(NamedTuple):
    """Of one instance."""

    answers: int
    right: int  # answers all of whose labels are the likeliest tokens
    labels: int
    nats: float  # -log p of all labels together

    @property
    def complete(self) -> bool:
        return self.right == self.answers


class Scorer:
    """Scores instances of any length; compiles for each shape it meets.

    Args:
      variables: {"params", "balance"}, on `mesh` if one is given.
      batch_tokens: in one pass; longer rows are read in chunks of so many.
    """

    def __init__(
        self,
        model: config.Model,
        variables: Any,
        *,
        batch_tokens: int,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.model = model
        self._variables, self._mesh = variables, mesh
        self._batch_tokens = batch_tokens
        self._pass = jax.jit(functools.partial(_losses, model))
        self._chunk = jax.jit(
            functools.partial(_chunk_losses, model), donate_argnames="cache"
        )

    def rows(self, length: int) -> int:
        """Instances of one pass."""
        shards = sharding.row_shards(self._mesh) if self._mesh else 1
        return max(1, self._batch_tokens // length // shards) * shards

    def score(
        self,
        examples: Sequence[Example],
        *,
        length: int | None = None,
        done: Callable[[int], None] = lambda count: None,
    ) -> list[Score]:
        """The score of each instance, in order.

        Args:
          length: T of the passes; None: the longest instance. Instances are filled up.
          done: told how many are scored, after every pass.
        """
        if not examples:
            return []
        length = self._padded(length or max(len(e.tokens_T) for e in examples))
        rows, asked = self.rows(length), max(int(e.asked_T.sum()) for e in examples)
        # Few different sizes, so that few programs are compiled.
        asked = min(length, max(16, 1 << (asked - 1).bit_length()))
        found: list[Score] = []
        for first in range(0, len(examples), rows):
            group = examples[first : first + rows]
            host = _arrays(group, rows, length, asked)
            read = self._in_chunks if rows * length > self._most(rows) else self._whole
            with jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext():
                right_BA, nats_BA = read(*host)
            found += map(_grade, group, right_BA, nats_BA)
            done(len(found))
        return found

    def _padded(self, length: int) -> int:
        parts = self._mesh.shape["context"] if self._mesh else 1
        return -(-length // parts) * parts

    def _most(self, rows: int) -> int:
        """Tokens of a pass that is not cut; one a row at least."""
        return max(self._batch_tokens, rows)

    def _whole(
        self,
        tokens_BT: np.ndarray,
        segment_ids_BT: np.ndarray,
        index_BA: np.ndarray,
        labels_BA: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether each label is right, and its nats, float64 [B, A]."""
        places = ("rows", "time"), ("rows", "time"), ("rows", None), ("rows", None)
        arrays = self._place((tokens_BT, segment_ids_BT, index_BA, labels_BA), places)
        right_BA, nats_BA = self._pass(self._variables, *arrays)
        return np.asarray(right_BA), np.asarray(nats_BA, np.float64)

    def _in_chunks(
        self,
        tokens_BT: np.ndarray,
        segment_ids_BT: np.ndarray,
        index_BA: np.ndarray,
        labels_BA: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`_whole`, with memory for one chunk of every row and the cache."""
        rows, length = tokens_BT.shape
        size = max(1, self._batch_tokens // rows)
        count_B = segment_ids_BT.sum(axis=1)
        cache = init_cache(self.model, rows, length, mesh=self._mesh)
        right_BA, nats_BA = np.zeros(labels_BA.shape, bool), np.zeros(labels_BA.shape)
        for first in range(0, int(count_B.max()), size):
            chunk_BC = tokens_BT[:, first : first + size]
            chunk_BC = np.pad(chunk_BC, ((0, 0), (0, size - chunk_BC.shape[1])))
            inside_BA = (index_BA >= first) & (index_BA < first + size)
            arrays = self._place(
                (
                    chunk_BC,
                    np.clip(count_B - first, 0, size).astype(np.int32),
                    np.clip(index_BA - first, 0, size - 1),
                    labels_BA,
                ),
                (("rows", None), ("rows",), ("rows", None), ("rows", None)),
            )
            cache, *found = self._chunk(self._variables, *arrays, cache=cache)
            for total_BA, part_BA in zip((right_BA, nats_BA), found, strict=True):
                total_BA[inside_BA] = np.asarray(part_BA)[inside_BA]
        return right_BA, nats_BA

    def _place(
        self, host: Sequence[np.ndarray], places: Sequence[tuple[str | None, ...]]
    ) -> list[Any]:
        if self._mesh is None:
            return list(host)
        return [
            jax.device_put(x, NamedSharding(self._mesh, sharding.spec(*place)))
            for x, place in zip(host, places, strict=True)
        ]


def _losses(
    model: config.Model,
    variables: Any,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    index_BA: jax.Array,
    labels_BA: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Whether each label is the likeliest token, and its -log p in nats, [B, A].

    Logits are made at the positions `index_BA` alone.
    """
    out = transformer.apply(model, variables, tokens_BT, segment_ids_BT)
    return _at(out, index_BA, labels_BA)


def _chunk_losses(
    model: config.Model,
    variables: Any,
    tokens_BC: jax.Array,
    count_B: jax.Array,
    index_BA: jax.Array,
    labels_BA: jax.Array,
    *,
    cache: Cache,
) -> tuple[Cache, jax.Array, jax.Array]:
    """The cache after a chunk, and `_losses` at indices that count within it."""
    out, cache = transformer.extend(model, variables, tokens_BC, count_B, cache)
    return cache, *_at(out, index_BA, labels_BA)


def _at(
    out: transformer.Forward, index_BA: jax.Array, labels_BA: jax.Array
) -> tuple[jax.Array, jax.Array]:
    h_BAD = jnp.take_along_axis(out.h_BTD, index_BA[..., None], axis=1)
    found_BA = chunked_predictions(h_BAD, out.unembed_DW, chunk_size=_CHUNK)
    weights_BA = jnp.ones(labels_BA.shape, jnp.float32)
    _, nats_BA = chunked_cross_entropy(
        h_BAD, out.unembed_DW, labels_BA, weights_BA, chunk_size=_CHUNK
    )
    return found_BA == labels_BA, nats_BA


def _arrays(
    examples: Sequence[Example], rows: int, length: int, asked: int
) -> tuple[np.ndarray, ...]:
    """tokens_BT, segment_ids_BT, index_BA, labels_BA; unused places hold zeros."""
    tokens_BT = np.zeros((rows, length), np.int32)
    segment_ids_BT = np.zeros((rows, length), np.int32)
    index_BA = np.zeros((rows, asked), np.int32)
    labels_BA = np.zeros((rows, asked), np.int32)
    for row, example in enumerate(examples):
        size, where = len(example.tokens_T), np.flatnonzero(example.asked_T)
        tokens_BT[row, :size] = example.tokens_T
        segment_ids_BT[row, :size] = 1
        index_BA[row, : len(where)] = where
        labels_BA[row, : len(where)] = example.labels_T[where]
    return tokens_BT, segment_ids_BT, index_BA, labels_BA


def _grade(example: Example, right_A: np.ndarray, nats_A: np.ndarray) -> Score:
    answer_A = example.answers_T[example.asked_T]
    count = len(answer_A)
    wrong = np.unique(answer_A[~right_A[:count]])
    answers = len(np.unique(answer_A))
    return Score(answers, answers - len(wrong), count, float(nats_A[:count].sum()))
