"""What the temporaries of a training step are made of, as far as JAX can tell.

The compiler tells their sum alone. What the forward pass keeps for the backward pass is
counted here in what JAX traces, exactly and without compiling; the gradients lie as the
parameters do; the rest is left over.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from kimi_jax import sharding
from kimi_jax.config import Config
from kimi_jax.train.program import Program
from kimi_jax.train.step import State


class Parts(NamedTuple):
    """Bytes on one device; the rest of the temporaries is work in progress.

    The rest: a unit of layers computed again and its backward pass, weights gathered
    for it, buffers of collectives, the optimizer's work.
    """

    activations: int  # kept for the backward pass of a micro-batch
    gradients: int  # summed over micro-batches


def parts_of(program: Program, cfg: Config, mesh: Mesh, state: State) -> Parts:
    """The parts of a step of `cfg` on `mesh`.

    Args:
      state: its shapes and places.
    """
    activations = kept_activations(program, cfg, mesh, state)
    return Parts(activations, sharding.local_bytes(state.params))


def kept_activations(program: Program, cfg: Config, mesh: Mesh, state: State) -> int:
    """Bytes on one device that the forward pass of a micro-batch leaves.

    It is what grows with the number of rows, so weights, which the backward pass needs
    too, are not in it. Rows and time are split over the mesh; the heads and hidden
    units of a tensor group are counted whole, which matters for remat=none only: the
    others keep no more than the residual stream.
    """
    rows = cfg.train.batch_size // cfg.train.micro_batches
    split = sharding.row_shards(mesh)
    few = _kept_bytes(program, _with_rows(cfg, split), mesh, state)
    more = _kept_bytes(program, _with_rows(cfg, 2 * split), mesh, state)
    devices = split * mesh.shape["context"]
    return (more - few) * (rows // split) // devices


def _with_rows(cfg: Config, rows: int) -> Config:
    train = dataclasses.replace(cfg.train, batch_size=rows, micro_batches=1)
    return dataclasses.replace(cfg, train=train)


def _kept_bytes(program: Program, cfg: Config, mesh: Mesh, state: State) -> int:
    """All that the backward pass of one batch is given, on all devices."""
    objective = program.objective(cfg)

    def backward(params: Any, balance: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            totals = objective.count(batch)
            return objective.loss(params, balance, batch, totals)

        return jax.vjp(loss, params, has_aux=True)[1]

    with jax.set_mesh(mesh):
        batch = program.batch(cfg, mesh)
        kept = jax.eval_shape(backward, state.params, state.balance, batch)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))
