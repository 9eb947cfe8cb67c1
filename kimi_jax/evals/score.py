"""Answers scored by forward passes over the whole instance, true answers included.

A label counts as right if the model finds it likeliest, given all that comes before.
For answers that are written (`tasks.example`), all labels being right is the same as
greedy generation writing exactly the answers: by induction over the labels, what was
generated so far is what the pass has read. Partial credit differs: a generation goes on
from its own mistakes, a pass from the truth.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import config, sharding
from kimi_jax.modules import transformer
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
      batch_tokens: in one pass; a single row may be longer.
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
        found: list[Score] = []
        for first in range(0, len(examples), rows):
            group = examples[first : first + rows]
            host = _arrays(group, rows, length, asked)
            with jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext():
                right_BA, nats_BA = self._pass(self._variables, *self._place(host))
            right_BA, nats_BA = np.asarray(right_BA), np.asarray(nats_BA, np.float64)
            found += map(_grade, group, right_BA, nats_BA)
            done(len(found))
        return found

    def _padded(self, length: int) -> int:
        parts = self._mesh.shape["context"] if self._mesh else 1
        return -(-length // parts) * parts

    def _place(self, host: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
        if self._mesh is None:
            return host
        rows = sharding.batch_sharding(self._mesh)
        everywhere = sharding.replicated(self._mesh)
        places = (rows, rows, everywhere, everywhere)
        return tuple(map(jax.device_put, host, places))


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
