"""One optimizer step: loss, gradients over micro-batches, update, router balancing.

The loss is the sum over tokens divided by the tokens of the whole batch, so splitting a
batch into micro-batches or over devices changes nothing. Router biases are updated here
and nowhere else, once a step, from what all micro-batches observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from kimi_jax import config
from kimi_jax.modules import statistics, transformer, vision
from kimi_jax.ops import balancing
from kimi_jax.ops.cross_entropy import chunked_cross_entropy
from kimi_jax.train import optimizer, qk_clip
from kimi_jax.train.batch import Batch
from kimi_jax.train.groups import head_spread, rms_by_group

_BALANCE_LOSS = "/balance_loss"


class State(NamedTuple):
    """Everything a run must keep to continue exactly."""

    step: jax.Array  # int32 scalar: finished steps
    params: Any
    balance: Any  # router biases
    optimizer: optax.OptState


def make_transform(cfg: config.Config) -> optax.GradientTransformation:
    """The optimizer of a run, laid out for the parameters of its model."""
    fresh = jax.eval_shape(lambda: transformer.init(cfg.model, jax.random.key(0)))
    return optimizer.make(cfg.optimizer, cfg.train.steps, fresh["params"])


def init_state(cfg: config.Config, transform: optax.GradientTransformation) -> State:
    variables = transformer.init(cfg.model, jax.random.key(cfg.train.seed))
    return start_state(transform, variables["params"], variables.get("balance", {}))


def start_state(
    transform: optax.GradientTransformation, params: Any, balance: Any
) -> State:
    """The state of step 0 with these parameters: a fresh optimizer, its clock at 0."""
    return State(jnp.zeros((), jnp.int32), params, balance, transform.init(params))


class Totals(NamedTuple):
    """Counts over the whole batch, by which micro-batches are normalised."""

    predicted: jax.Array  # sum of weights
    tokens: jax.Array  # positions that are not padding


def count(batch: Batch) -> Totals:
    """The totals of a whole batch, at least one each."""
    return Totals(
        jnp.maximum(jnp.sum(batch.weights_BT), 1.0),
        jnp.maximum(jnp.sum(batch.segment_ids_BT > 0), 1),
    )


class Report(NamedTuple):
    """Scalars that a loss reports of a micro-batch."""

    sums: dict[str, jax.Array]  # add up over micro-batches
    maxima: dict[str, jax.Array]


class Objective(NamedTuple):
    """What steps minimise, on batches of any kind: rows of arrays [B, ...].

    Attributes:
      loss: (params, balance, batch, totals) -> (share, (report, stats)). The shares of
        the micro-batches add up to the loss; `stats` maps names to what the layers
        sowed.
      count: batch -> totals, counts over the whole batch by which shares are
        normalised; `tokens`, positions that are not padding, is one of them.
      metrics: (report, stats, totals) -> metrics of the step, the loss among them.
      update_balance: let router biases follow the loads.
    """

    loss: Callable[..., tuple[jax.Array, Any]]
    count: Callable[[Any], Any]
    metrics: Callable[[Report, Mapping[str, jax.Array], Any], dict[str, Any]]
    update_balance: bool = True


def cross_entropy(cfg: config.Config) -> Objective:
    """Of pre-training. Metrics: loss, nats a predicted token, and predicted tokens."""

    def metrics(report: Report, _: Any, totals: Totals) -> dict[str, Any]:
        loss = report.sums["nats"] / totals.predicted
        return {"loss": loss, "predicted": totals.predicted}

    return Objective(make_loss(cfg), count, metrics)


def make_loss(cfg: config.Config) -> Callable[..., tuple[jax.Array, Any]]:
    """The `loss` of `cross_entropy`; the summed cross-entropy alone is "nats"."""
    aux_weight = cfg.model.moe.balancing.aux_weight

    def loss(params: Any, balance: Any, batch: Batch, totals: Totals) -> Any:
        out = forward(
            cfg.model,
            {"params": params, "balance": balance},
            batch,
            remat=cfg.train.remat,
            observe=True,
            max_logits=cfg.optimizer.qk_clip is not None,
        )
        stats = traverse_util.flatten_dict(out.stats, sep="/")
        loss_sum, losses_BT = token_losses(cfg, out, batch)
        share = loss_sum / totals.predicted
        share += aux_weight * balance_loss(stats) / totals.tokens
        nats = jnp.sum(losses_BT * batch.weights_BT)
        return share, (Report({"nats": nats}, {}), jax.lax.stop_gradient(stats))

    return loss


def balance_loss(stats: Mapping[str, jax.Array]) -> jax.Array | float:
    """What balancing by an auxiliary loss observed, summed over layers and tokens."""
    return sum(jnp.sum(x) for name, x in stats.items() if name.endswith(_BALANCE_LOSS))


def forward(
    model: config.Model,
    variables: transformer.Variables,
    batch: Batch,
    *,
    remat: str = "none",
    **options: Any,
) -> transformer.Forward:
    """`transformer.apply` to the texts of a batch and to what they show."""
    features_BMD = None
    if batch.media is not None:
        features_BMD = vision.features(model, variables, batch.media, remat=remat)
    return transformer.apply(
        model,
        variables,
        batch.tokens_BT,
        batch.segment_ids_BT,
        features_BMD=features_BMD,
        remat=remat,
        **options,
    )


def token_losses(
    cfg: config.Config, out: transformer.Forward, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Weighted loss sum, and each token's unweighted cross-entropy [B, T]; nats."""
    return chunked_cross_entropy(
        out.h_BTD,
        out.unembed_DW,
        batch.targets_BT,
        batch.weights_BT,
        chunk_size=cfg.train.loss_chunk,
        z_loss=cfg.train.z_loss,
    )


def make_train_step(
    cfg: config.Config,
    transform: optax.GradientTransformation,
    objective: Objective | None = None,
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """(state, batch, go) -> (state, metrics).

    A step counts as finite if its loss, gradients and updates are; one that is not
    changes no parameter, moment or bias (see `_without_update`). Without `go` the whole
    state stays as it is, step number included.

    Metrics: those of the objective; gradient_norm; finite; groups, scalars by name: RMS
    of the gradients (before the clipping) and of the updates (with rate and decay), how
    evenly heads share these, what QK-clip saw; and stats: what the table in
    `kimi_jax.modules.statistics` lists, and bias_update, stacked by scan.

    Args:
      objective: None: `cross_entropy`.
    """
    objective = cross_entropy(cfg) if objective is None else objective

    def train_step(
        state: State, batch: Any, go: jax.Array | bool = True
    ) -> tuple[State, dict[str, Any]]:
        totals = objective.count(batch)
        grads, report, stats = _gradients(cfg, objective, state, batch, totals)
        updates, opt_state = transform.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        update_rms = rms_by_group(updates, "update_rms")
        groups = rms_by_group(grads, "gradient_rms") | update_rms
        groups |= head_spread(updates, "update_head_spread")
        if cfg.optimizer.qk_clip is not None:
            max_logits = _max_logits(stats)
            tau = cfg.optimizer.qk_clip
            params = qk_clip.clip(cfg.model, params, max_logits, tau)
            groups |= qk_clip.summary(max_logits, tau)
        balance = state.balance
        if objective.update_balance:
            balance = _update_balance(cfg.model.moe, balance, stats)
        new = State(state.step + 1, params, balance, opt_state)
        norm = optax.tree.norm(grads)
        said = sum(report.sums.values()) + sum(update_rms.values())
        finite = jnp.isfinite(norm + said)
        old = _without_update(cfg.train.on_nonfinite, state, new)
        metrics = objective.metrics(report, stats, totals) | {
            "gradient_norm": norm,
            "finite": finite,
            "groups": groups,
            "stats": _monitored(stats) | _bias_updates(state.balance, new.balance),
        }
        return _choose(go, _choose(finite, new, old), state), metrics

    return train_step


def _gradients(
    cfg: config.Config, objective: Objective, state: State, batch: Any, totals: Any
) -> tuple[Any, Report, dict[str, jax.Array]]:
    """Gradients, report and statistics of a batch, over its micro-batches."""
    grad = jax.grad(objective.loss, has_aux=True)

    def of_micro_batch(batch: Any) -> tuple[Any, Any]:
        """(what adds up over micro-batches, what is listed)."""
        grads, (report, stats) = grad(state.params, state.balance, batch, totals)
        summed, listed = statistics.partition(stats)
        return (grads, report.sums, summed), (report.maxima, listed)

    micro = split(batch, cfg.train.micro_batches)
    (grads, sums, summed), (maxima, listed) = _sum_scan(of_micro_batch, micro)
    maxima = jax.tree.map(lambda x: jnp.max(x, axis=0), maxima)
    stats = statistics.combine(summed, listed, totals.tokens)
    return grads, Report(sums, maxima), stats


def _without_update(policy: str, state: State, new: State) -> State:
    """The state after a step that is not finite.

    "stop": the state before it. "skip": the same, but the step counts, so that the data
    moves on, and so does the clock of the learning rate, which follows the step.
    """
    if policy == "stop":
        return state
    moments = jax.tree.map(
        lambda before, after: after if _is_clock(after) else before,
        state.optimizer,
        new.optimizer,
        is_leaf=_is_clock,
    )
    return state._replace(step=new.step, optimizer=moments)


def restart_clock(state: State) -> State:
    """The state at the start of another schedule: its step is 0, its moments stay."""
    return move_clock(state, 0)


def move_clock(state: State, step: int) -> State:
    """The state as if `step` steps were done; parameters and moments stay."""

    def set_to(x: jax.Array) -> jax.Array:
        return jax.device_put(np.full(x.shape, step, x.dtype), x.sharding)

    optimizer = jax.tree.map(
        lambda node: (
            node._replace(count=set_to(node.count)) if _is_clock(node) else node
        ),
        state.optimizer,
        is_leaf=_is_clock,
    )
    return state._replace(step=set_to(state.step), optimizer=optimizer)


def _is_clock(node: Any) -> bool:
    """Whether it counts the steps of the learning rate's schedule."""
    return isinstance(node, optax.ScaleByScheduleState)


def _choose(condition: jax.Array | bool, a: State, b: State) -> State:
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), a, b)


def split[Rows](batch: Rows, micro_batches: int) -> Rows:
    """[B, ...] -> [micro-batches, rows, ...], every one with rows of every device."""

    def split_rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split_rows, batch)


def _sum_scan(function: Callable[[Any], tuple[Any, Any]], xs: Any) -> tuple[Any, Any]:
    """(sum of the first results, stack of the second) of `function` over `xs`.

    A scan, so that the program does not grow with the number of micro-batches.
    """
    function = jax.jit(function)  # traced once for its shapes and for the scan
    first = jax.tree.map(lambda x: x[0], xs)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, first)[0])

    def add(total: Any, x: Any) -> tuple[Any, Any]:
        summed, listed = function(x)
        return jax.tree.map(jnp.add, total, summed), listed

    return jax.lax.scan(add, zeros, xs)


def _max_logits(stats: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x for name, x in stats.items() if name.endswith(qk_clip.STATISTIC)}


def _update_balance(moe: config.MoE, balance: Any, stats: dict[str, jax.Array]) -> Any:
    """The router state for the next step, layer by layer."""

    def update(bias_E: jax.Array, observed: dict[str, jax.Array]) -> jax.Array:
        method = moe.balancing
        return balancing.update(
            method.method,
            bias_E,
            observed,
            active=moe.num_active,
            ema=method.ema,
            step=method.step,
            low=method.low,
            high=method.high,
        )

    biases = traverse_util.flatten_dict(balance, sep="/")
    for name, bias_RUE in biases.items():
        prefix = name.removesuffix("bias")
        observed = {
            key.removeprefix(prefix): x
            for key, x in stats.items()
            if key.startswith(prefix)
        }
        # The two leading axes are those of the scans.
        biases[name] = jax.vmap(jax.vmap(update))(bias_RUE, observed)
    return traverse_util.unflatten_dict(biases, sep="/")


def _monitored(stats: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The small statistics, which leave the step."""
    return {name: x for name, x in stats.items() if statistics.is_monitored(name)}


def _bias_updates(old: Any, new: Any) -> dict[str, jax.Array]:
    """{".../moe/bias_update": largest change of a router bias, for each layer}."""
    move = jax.tree.map(lambda a, b: jnp.max(jnp.abs(b - a), axis=-1), old, new)
    flat = traverse_util.flatten_dict(move, sep="/")
    return {f"{name}_update": x for name, x in flat.items()}
