"""Log-probabilities of rows whose activations do not fit into memory at once.

Rows are read in pieces of equal length, one after the other. A piece starts from what
the one before left: states and convolution tails of KDA, and the latents of all earlier
tokens for softmax attention, which reads those that its documents reach. Nothing is
approximated: values and gradients are those of whole rows.

The backward pass walks the pieces in reverse and runs each once more, from the states
that it began with. What is kept are these states (of fixed size, for each piece), the
latents, and one gradient of each; the activations are those of one piece. A plain
`lax.scan` under `jax.checkpoint` would keep the latents once for every piece instead,
which is why the pass is written by hand.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from kimi_jax import config, sharding
from kimi_jax.errors import UserError
from kimi_jax.modules import statistics, transformer
from kimi_jax.modules.cache import Segment, segment_shape
from kimi_jax.ops.cross_entropy import chunked_logprobs
from kimi_jax.ops.segments import document_starts
from kimi_jax.train.step import balance_loss

# On the stacked latents [*, *, pieces, B, length, ...].
_PIECES = 2

Tree = dict[str, Any]


class Rows(NamedTuple):
    """What is read, [B, T] each; or of all pieces, [pieces, B, length]."""

    tokens_BT: jax.Array
    targets_BT: jax.Array
    segment_ids_BT: jax.Array
    routes_BTLA: jax.Array | None = None


class Scores(NamedTuple):
    """What rows, or pieces of them, are found to be."""

    logprob_BT: jax.Array
    entropy_BT: jax.Array
    balance_loss: jax.Array  # summed over layers and tokens, 0 without such a loss


class _Piece(NamedTuple):
    rows: Rows
    number: jax.Array
    start_BT: jax.Array  # see `Segment`


class _Options(NamedTuple):
    cfg: config.Config
    reports: tuple[tuple[str, Any], ...]  # options of the forward pass


def score(
    cfg: config.Config,
    variables: Tree,
    rows: Rows,
    *,
    length: int | None = None,
    observe: bool = False,
    routes: bool = False,
) -> tuple[Scores, dict[str, jax.Array]]:
    """Log-probabilities of the targets, and the statistics of the layers by name.

    Differentiable by the parameters, in reverse mode.

    Args:
      variables: {"params", "balance"}.
      length: tokens of a piece; None: whole rows.
      observe: report statistics, those that are means of tokens as their sums.
      routes: report the experts instead, routes_BTA of each layer; not both.

    Raises:
      UserError: the pieces do not fill the rows, or the mesh splits time as well.
    """
    reports: dict[str, Any] = {
        "remat": cfg.train.remat,
        "observe": observe,
        "max_logits": cfg.optimizer.qk_clip is not None,
        "routes": routes,
    }
    if length is None:
        out = transformer.apply(
            cfg.model,
            variables,
            rows.tokens_BT,
            rows.segment_ids_BT,
            routes_BTLA=rows.routes_BTLA,
            **reports,
        )
        return _scores(cfg, out, rows)
    _check(cfg, rows, length)
    options = _Options(cfg, tuple(reports.items()))
    balance = variables.get("balance", {})
    pieces = _cut(rows, length)
    found, stats_n = _run(options, variables["params"], balance, pieces)
    logprob_BT, entropy_BT = (_join(x, 0) for x in found[:2])
    found = Scores(logprob_BT, entropy_BT, jnp.sum(found.balance_loss))
    if routes:  # [pieces, *, *, B, length, A]
        return found, {name: _join(x, 2) for name, x in stats_n.items()}
    summed, listed = statistics.partition(stats_n)
    summed = {k: jnp.sum(x, axis=0, dtype=x.dtype) for k, x in summed.items()}
    return found, statistics.combine(summed, listed, jnp.ones((), jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: _Options, params: Tree, balance: Tree, pieces: _Piece) -> Any:
    """Scores and statistics of every piece, stacked."""
    return _run_fwd(options, params, balance, pieces)[0]


def _run_fwd(options: _Options, params: Tree, balance: Tree, pieces: _Piece) -> Any:
    handed, kept = _start(options, pieces)

    def step(memory: Any, piece: _Piece) -> Any:
        handed, kept = memory
        found, stats = _of_piece(options, params, balance, handed, kept, piece)
        scores, new, latents = found
        put = functools.partial(_put, number=piece.number)
        return (new, jax.tree.map(put, kept, latents)), (scores, stats, handed)

    (_, kept), (scores, stats, handed) = jax.lax.scan(step, (handed, kept), pieces)
    return (scores, stats), (params, balance, pieces, handed, kept)


def _run_bwd(options: _Options, saved: Any, cotangents: Any) -> Any:
    params, balance, pieces, handed, kept = saved
    dscores, _ = cotangents

    def step(grads: Any, own: Any) -> Any:
        piece, handed, dscores = own
        dparams, dnew, dkept = grads

        def run(params: Tree, handed: Tree, kept: Tree) -> Any:
            return _of_piece(options, params, balance, handed, kept, piece)[0]

        (_, _, latents), pull = jax.vjp(run, params, handed, kept)
        take = functools.partial(_take, number=piece.number)
        dlatents = jax.tree.map(lambda d, x: take(d).astype(x.dtype), dkept, latents)
        more, dhanded, more_kept = pull((dscores, dnew, dlatents))
        dparams, dkept = jax.tree.map(jnp.add, (dparams, dkept), (more, more_kept))
        return (dparams, dhanded, dkept), None

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    dlast = jax.tree.map(lambda x: jnp.zeros_like(x[0]), handed)
    grads = jax.tree.map(jnp.zeros_like, params), dlast, jax.tree.map(zeros, kept)
    grads, _ = jax.lax.scan(step, grads, (pieces, handed, dscores), reverse=True)
    return grads[0], None, None


_run.defvjp(_run_fwd, _run_bwd)


def _of_piece(
    options: _Options,
    params: Tree,
    balance: Tree,
    handed: Tree,
    kept: Tree,
    piece: _Piece,
) -> tuple[tuple[Scores, Tree, Tree], dict[str, jax.Array]]:
    """((scores, what the next piece is handed, latents), statistics)."""
    cfg, rows = options.cfg, piece.rows
    out, left = transformer.carry(
        cfg.model,
        {"params": params, "balance": balance},
        rows.tokens_BT,
        rows.segment_ids_BT,
        Segment(piece.number, piece.start_BT),
        _merged(handed, kept),
        routes_BTLA=rows.routes_BTLA,
        **dict(options.reports),
    )
    scores, stats = _scores(cfg, out, rows)
    return (scores, _like(handed, left), _like(kept, left)), stats


def _scores(
    cfg: config.Config, out: transformer.Forward, rows: Rows
) -> tuple[Scores, dict[str, jax.Array]]:
    logprob_BT, entropy_BT = chunked_logprobs(
        out.h_BTD, out.unembed_DW, rows.targets_BT, chunk_size=cfg.train.loss_chunk
    )
    stats = traverse_util.flatten_dict(out.stats, sep="/")
    balance = jnp.asarray(balance_loss(stats), logprob_BT.dtype)
    return Scores(logprob_BT, entropy_BT, balance), stats


def _start(options: _Options, pieces: _Piece) -> tuple[Tree, Tree]:
    """The memory before the first piece."""
    count, B, length = pieces.rows.tokens_BT.shape
    shapes = segment_shape(options.cfg.model, B, count, length)
    handed, kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return handed, kept


def _cut(rows: Rows, length: int) -> _Piece:
    """The pieces, [pieces, B, length, ...]."""
    T = rows.tokens_BT.shape[1]
    t_T = jnp.arange(T, dtype=jnp.int32)
    # Padding starts at itself.
    start_BT = jnp.minimum(document_starts(rows.segment_ids_BT), t_T)
    start_BT -= t_T // length * length

    def cut(x_BT: jax.Array) -> jax.Array:
        B = x_BT.shape[0]
        return jnp.moveaxis(x_BT.reshape(B, -1, length, *x_BT.shape[2:]), 1, 0)

    rows, start_BT = jax.tree.map(cut, (rows, start_BT))
    return _Piece(rows, jnp.arange(T // length, dtype=jnp.int32), start_BT)


def _join(x: jax.Array, lead: int) -> jax.Array:
    """[pieces, *lead, B, length, ...] -> [*lead, B, T, ...]."""
    x = jnp.moveaxis(x, 0, lead + 1)
    shape = x.shape
    return x.reshape(*shape[: lead + 1], -1, *shape[lead + 3 :])


def _put(kept: jax.Array, latents: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(kept, latents, number, _PIECES)


def _take(kept: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(kept, number, _PIECES, keepdims=False)


def _merged(one: Tree, other: Tree) -> Tree:
    flat = traverse_util.flatten_dict(one) | traverse_util.flatten_dict(other)
    return traverse_util.unflatten_dict(flat)


def _like(tree: Tree, left: Tree) -> Tree:
    """The part of `left` under the names of `tree`."""
    flat = traverse_util.flatten_dict(left)
    names = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({name: flat[name] for name in names})


def _check(cfg: config.Config, rows: Rows, length: int) -> None:
    T = rows.tokens_BT.shape[1]
    if length < 2 or T % length:
        near = [n for n in range(2, T + 1) if T % n == 0]
        fits = min(near, key=lambda n: abs(n - length), default=T)
        raise UserError(
            f"config.rl.segment={length}: pieces of at least 2 tokens must fill rows "
            f"of config.train.seq_len={T}; use {fits}"
        )
    mesh = sharding.context_mesh()
    if mesh is not None and mesh.shape["context"] > 1:
        raise UserError(
            f"config.rl.segment={length} and config.mesh.context="
            f"{mesh.shape['context']} both cut time; set one to None, or 1"
        )
