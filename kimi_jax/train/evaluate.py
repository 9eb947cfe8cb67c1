"""The loss of the held-out text, during training: whole, and by length of context.

The text is read in windows of the training length and of multiples of it. A position is
how much of its document the model has seen: tokens since the document or the window
began, whichever came later, the current one included. Long documents in long windows
are what tests long contexts; the place in a window of short documents says nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import sharding
from kimi_jax.config import Config, Train
from kimi_jax.data import loader
from kimi_jax.errors import UserError
from kimi_jax.ops.cross_entropy import chunked_predictions
from kimi_jax.ops.segments import positions_in_segments
from kimi_jax.train.batch import Batch, batch_shape, on_mesh
from kimi_jax.train.step import State, forward, token_losses

Sums = dict[str, np.ndarray]


class _Length(NamedTuple):
    """How windows of one length are evaluated."""

    length: int
    batches: loader.HeldOut
    step: Callable[[State, Batch], dict[str, jax.Array]]
    upto_P: tuple[int, ...]  # the last position of each bin


class Evaluator:
    """state -> fields of an "eval" record. Compiles when it is made."""

    def __init__(
        self,
        cfg: Config,
        data: loader.Data,
        mesh: jax.sharding.Mesh,
        state: State,
    ):
        self._rows = sharding.batch_sharding(mesh)
        self._train_length = cfg.train.seq_len
        self._lengths = [
            _prepare(cfg, data, mesh, state, multiple)
            for multiple in cfg.train.eval_length_multiples
        ]

    def __call__(self, state: State) -> dict[str, Any]:
        """Reads the state and changes nothing.

        Returns:
          loss (nats a token), bits_per_byte and tokens at the training length, and of
          graded data accuracy, the share of answer tokens that are the likeliest;
          seconds; and `lengths`, which holds for each length of windows:

            loss, bits_per_byte, tokens, accuracy
            position_loss, position_tokens, position_accuracy
                                             by the last position of each bin
            beyond_loss, beyond_bits_per_byte, beyond_tokens
                      at positions past the training length, if there are any
        """
        started = time.monotonic()
        lengths = {
            str(length.length): summarise(
                _sum_up(length, state, self._rows), length.upto_P, self._train_length
            )
            for length in self._lengths
        }
        first = lengths[str(self._train_length)]
        names = ("loss", "bits_per_byte", "tokens", "accuracy")
        whole = {name: first[name] for name in names if name in first}
        return {**whole, "seconds": time.monotonic() - started, "lengths": lengths}


def check_lengths(cfg: Config, data: loader.Data) -> None:
    """Raises UserError for windows that no held-out text could fill."""
    held_out = data.summary.get("validation_tokens")
    for multiple in cfg.train.eval_length_multiples[1:]:
        length = multiple * cfg.train.seq_len
        if isinstance(held_out, int) and length > held_out:
            raise UserError(
                f"config.train.eval_length_multiples: {multiple} asks for windows of "
                f"{length:,} tokens, and the held-out text has {held_out:,}; leave it "
                "out, or raise config.data.validation_fraction"
            )


def evaluate_length(
    cfg: Config,
    data: loader.Data,
    mesh: jax.sharding.Mesh,
    state: State,
    multiple: int,
) -> dict[str, Any]:
    """The record of one length, as in the `lengths` of `Evaluator`; compiles for it."""
    length = _prepare(cfg, data, mesh, state, multiple)
    sums = _sum_up(length, state, sharding.batch_sharding(mesh))
    return summarise(sums, length.upto_P, cfg.train.seq_len)


def _sum_up(length: _Length, state: State, rows: jax.sharding.NamedSharding) -> Sums:
    total: Sums = {}
    for host in loader.iterate(length.batches, 0, len(length.batches)):
        sums = length.step(state, on_mesh(host, rows))
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)
    return total


_SUMS = ("nats", "tokens", "bytes")


def position_bins(train_length: int, longest: int) -> tuple[int, ...]:
    """The last position of each bin, counted from 1: 1, 2, 4, 8, ... up to `longest`.

    The training length ends a bin, and the bins after it double from there, so that no
    bin mixes positions that training has seen with those that it has not.
    """
    upto = [2**k for k in range(train_length.bit_length()) if 2**k < train_length]
    last = train_length
    while last < longest:
        upto.append(last)
        last *= 2
    return (*upto, longest)


def rows_at(train: Train, multiple: int, shards: int) -> int:
    """Rows of an evaluation batch: as many tokens as in training, split evenly.

    At least one row for each of the mesh's `shards` of rows.
    """
    return max(1, train.batch_size // multiple // shards) * shards


def make_eval_step(
    cfg: Config,
    upto_P: tuple[int, ...],
    bytes_per_token: np.ndarray,
    graded: bool = False,
) -> Callable[[State, Batch], dict[str, jax.Array]]:
    """(state, batch) -> nats, tokens and bytes of text, summed in each bin [P].

    With `graded`, also correct: the tokens that the model finds likeliest.
    """

    def eval_step(state: State, batch: Batch) -> dict[str, jax.Array]:
        variables = {"params": state.params, "balance": state.balance}
        out = forward(cfg.model, variables, batch)
        _, losses_BT = token_losses(cfg, out, batch)
        positions_BT = 1 + positions_in_segments(batch.segment_ids_BT)
        bin_BT = jnp.searchsorted(jnp.array(upto_P), positions_BT)
        in_bin_PBT = bin_BT == jnp.arange(len(upto_P))[:, None, None]
        weights_BT = batch.weights_BT
        bytes_BT = jnp.asarray(bytes_per_token, jnp.float32)[batch.targets_BT]

        def by_bin(x_BT: jax.Array) -> jax.Array:
            # A masked sum, unlike a scatter, adds in the same order every time.
            return jnp.sum(jnp.where(in_bin_PBT, x_BT * weights_BT, 0), axis=(1, 2))

        sums = {
            "nats": by_bin(losses_BT),
            "tokens": by_bin(jnp.ones_like(weights_BT)),
            "bytes": by_bin(bytes_BT),
        }
        if graded:
            found_BT = chunked_predictions(
                out.h_BTD, out.unembed_DW, chunk_size=cfg.train.loss_chunk
            )
            sums["correct"] = by_bin((found_BT == batch.targets_BT).astype(jnp.float32))
        return sums

    return eval_step


def summarise(sums: Sums, upto_P: tuple[int, ...], train_length: int) -> dict[str, Any]:
    """The record of one length, see `Evaluator`; bins without a token are left out."""
    upto = np.array(upto_P)
    seen = [int(p) for p in np.flatnonzero(sums["tokens"])]
    beyond = upto > train_length
    record = _loss(sums, np.ones_like(beyond), "")
    if sums["tokens"][beyond].any():
        record |= _loss(sums, beyond, "beyond_")
    nats_P, tokens_P = sums["nats"], sums["tokens"]
    record["position_loss"] = {str(upto[p]): nats_P[p] / tokens_P[p] for p in seen}
    record["position_tokens"] = {str(upto[p]): int(tokens_P[p]) for p in seen}
    if "correct" in sums:
        right_P = sums["correct"]
        record["accuracy"] = float(right_P.sum() / max(tokens_P.sum(), 1.0))
        record["position_accuracy"] = {
            str(upto[p]): right_P[p] / tokens_P[p] for p in seen
        }
    return record


def _loss(sums: Sums, chosen_P: np.ndarray, prefix: str) -> dict[str, Any]:
    nats, tokens, num_bytes = (float(sums[name][chosen_P].sum()) for name in _SUMS)
    return {
        f"{prefix}loss": nats / tokens if tokens else math.nan,
        f"{prefix}bits_per_byte": nats / math.log(2) / num_bytes
        if num_bytes
        else math.nan,
        f"{prefix}tokens": int(tokens),
    }


def _prepare(
    cfg: Config,
    data: loader.Data,
    mesh: jax.sharding.Mesh,
    state: State,
    multiple: int,
) -> _Length:
    length = cfg.train.seq_len * multiple
    batch_size = rows_at(cfg.train, multiple, sharding.row_shards(mesh))
    upto_P = position_bins(cfg.train.seq_len, length)
    step = jax.jit(
        make_eval_step(
            cfg, upto_P, data.tokenizer.bytes_per_token, data.validation.graded
        ),
        out_shardings=sharding.replicated(mesh),  # every process reads the sums
    )
    shape = dataclasses.replace(
        cfg.train,
        batch_size=batch_size,
        seq_len=length,
        row_patches=cfg.train.row_patches * multiple,
        row_items=cfg.train.row_items * multiple,
    )
    batch = batch_shape(shape, sharding.batch_sharding(mesh), cfg.model.vision)
    with jax.set_mesh(mesh):
        compiled = step.lower(state, batch).compile()
    return _Length(length, data.validation.at(length, batch_size), compiled, upto_P)
