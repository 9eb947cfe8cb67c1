"""The loss of the held-out text, during training."""

from __future__ import annotations

import math

import jax

from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.train.batch import batch_shape, on_mesh
from kimi_jax.train.step import State, make_eval_step


class Evaluator:
    """state -> fields of an "eval" record. Compiles when it is made."""

    def __init__(
        self,
        cfg: Config,
        data: loader.Data,
        rows: jax.sharding.NamedSharding,
        state: State,
    ):
        self._batches, self._rows = data.validation, rows
        self._bytes_W = data.tokenizer.bytes_per_token
        step = jax.jit(make_eval_step(cfg))
        self._step = step.lower(state, batch_shape(cfg.train, rows)).compile()

    def __call__(self, state: State) -> dict[str, float]:
        """loss (nats a token), bits_per_byte, tokens."""
        nats = tokens = num_bytes = 0.0
        for host in loader.iterate(self._batches, 0, len(self._batches)):
            sums = self._step(state, on_mesh(host, self._rows))
            nats += float(sums["nats"])
            tokens += float(sums["tokens"])
            num_bytes += float((self._bytes_W[host["targets"]] * host["weights"]).sum())
        return {
            "loss": nats / tokens,
            "bits_per_byte": nats / math.log(2) / num_bytes,
            "tokens": int(tokens),
        }
