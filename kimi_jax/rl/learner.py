"""The learning half of an iteration: rows, scores, optimizer steps, what they showed.

trajectories -> rows of `train.batch_size` x `train.seq_len`
             -> log-probabilities under the policy of now, the reference, the teacher
             -> `rl.steps_per_iteration` optimizer steps, each on rows of its own
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kimi_jax import distributed, sharding
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.interop.load import load_model, read_variables
from kimi_jax.interop.sources import open_source
from kimi_jax.monitor.console import Progress
from kimi_jax.monitor.metrics import Writer
from kimi_jax.rl import agreement
from kimi_jax.rl.experience import Experience, Packed, make_experience, on_mesh
from kimi_jax.rl.health import mean_of
from kimi_jax.rl.program import LEARNER, recorded_routes, scored_fields
from kimi_jax.rl.step import make_score
from kimi_jax.rl.trajectory import Trajectory
from kimi_jax.train import health
from kimi_jax.train.batch import Batch
from kimi_jax.train.nonfinite import Feed, GuardedStep
from kimi_jax.train.program import compile_fast, lower_step, state_shape
from kimi_jax.train.step import State, init_state, move_clock

START = "start"


class Learned(NamedTuple):
    """What an iteration's steps showed.

    Attributes:
      left: numbers of the trajectories that had no room in the rows.
      steps: that were taken; there is none where nothing is to be learned.
      numbers: for the "rl" field of the record.
      record: fields beside it.
    """

    left: list[int]
    steps: int
    numbers: dict[str, Any]
    record: dict[str, Any]


class Learner:
    """Compiled once; `learn` is an iteration's share of it."""

    def __init__(
        self,
        cfg: Config,
        mesh: jax.sharding.Mesh,
        transform: optax.GradientTransformation,
        folder: pathlib.Path,
        writer: Writer,
        progress: Progress,
        around: Callable[[Any], Any],
    ):
        """
        Args:
          around: of the compiled step, such as `Profiler.around`.
        """
        assert cfg.rl is not None
        self._cfg, self._rl, self._mesh = cfg, cfg.rl, mesh
        self._rows = sharding.batch_sharding(mesh)
        self._replay = recorded_routes(cfg.model)
        self._scored = scored_fields(cfg.rl)
        self._others: dict[str, Any] = {}
        self._score = jax.jit(make_score(cfg, cfg.rl.segment))
        shapes = state_shape(cfg, mesh, transform)
        step = lower_step(LEARNER, cfg, mesh, transform, shapes).compile()
        feed = Feed(
            lambda host: on_mesh(host, self._rows),
            lambda placed: {k: x for k, x in placed._asdict().items() if x is not None},
            _as_text,
        )
        self._step = GuardedStep(
            around(step), cfg, mesh, folder, writer, progress, feed
        )
        self._note = progress.note

    def learn(
        self,
        state: State,
        trajectories: Sequence[Trajectory],
        credit: Sequence[Any],
        version: int,
    ) -> tuple[State, Learned]:
        """Take an iteration's steps.

        Args:
          credit: advantages of each trajectory, one a turn.
          version: of the policy in `state`.

        Raises:
          NonFinite: see `GuardedStep`.
        """
        started, first = time.monotonic(), int(state.step)
        last = first + self._rl.steps_per_iteration
        packed = self._pack(trajectories, credit)
        old, batches, numbers = self._scores(state, packed)
        ages = [_with_ages(t, version, self._rl.groups) for t in trajectories]
        numbers |= _mismatch(packed, self._pack(ages, credit), old)
        state, seen, loads = self._steps(state, first, batches)
        if int(state.step) != last:
            # The schedule of the rate goes by what was planned, not by what was there.
            state = move_clock(state, last)
        numbers |= _means([metrics["rl"] for metrics in seen])
        numbers |= {f"dropped_{k}": n for k, n in packed.dropped.items() if n}
        seconds = time.monotonic() - started
        numbers["learn_seconds"] = seconds
        if seen:
            tokens = sum(len(trajectories[i].tokens) for i in packed.used)
            numbers["learn_tokens_per_second"] = tokens / seconds
        record = self._record(state, seen, loads)
        return state, Learned(packed.left, len(seen), numbers, record)

    def _pack(
        self, trajectories: Sequence[Trajectory], credit: Sequence[Any]
    ) -> Packed:
        return make_experience(
            trajectories,
            credit,
            self._cfg.train.seq_len,
            self._cfg.train.batch_size,
            batches=self._rl.steps_per_iteration,
            replay=self._replay,
        )

    def _scores(
        self, state: State, packed: Packed
    ) -> tuple[list[np.ndarray], list[Experience], dict[str, Any]]:
        """Log-probabilities of all batches; those that teach something, scored; how
        far sampler and learner choose the same experts."""
        old, overlap, batches = [], [], []
        for batch in packed.batches:
            sampled = batch.routes_BTLA
            if not self._rl.replay_routes:
                batch = batch._replace(routes_BTLA=None)
            scored, routes = self._under(state.params, state.balance, batch)
            old.append(scored)
            if routes is not None and self._replay and not self._rl.replay_routes:
                shares = agreement.routing_overlap(sampled, routes, self._replay[2])
                overlap.append(shares["slots"])
            if batch.weights_BT.any():
                batches.append(batch._replace(old_BT=scored, **self._reference(batch)))
        numbers = {"routing_overlap": float(np.mean(overlap))} if overlap else {}
        return old, batches, numbers

    def _under(
        self, params: Any, balance: Any, batch: Experience, score: Any = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(log-probabilities, experts) of a batch under these parameters."""
        with jax.set_mesh(self._mesh):
            logprob_BT, _, routes_BTLA = (score or self._score)(
                params, balance, on_mesh(batch, self._rows)
            )
        routes = None if routes_BTLA is None else distributed.whole(routes_BTLA)
        return distributed.whole(logprob_BT), routes

    def _reference(self, batch: Experience) -> dict[str, np.ndarray]:
        """What other policies make of a batch, by its field."""
        own = batch._replace(routes_BTLA=None)
        found = {}
        for name in self._scored[1:]:
            variables, score = self._other(name)
            scored, _ = self._under(
                variables["params"], variables.get("balance", {}), own, score
            )
            found[name] = scored
        return found

    def _other(self, name: str) -> tuple[Any, Any]:
        """(variables, score) of the reference or the teacher, read at the first use."""
        if name not in self._others:
            made = self._teacher() if name == "teacher_BT" else self._start()
            self._others[name] = made
        return self._others[name]

    def _teacher(self) -> tuple[Any, Any]:
        self._note(f"reading the teacher from {self._rl.teacher} ...")
        model, variables = load_model(self._rl.teacher, self._mesh)
        if model.vocab_size != self._cfg.model.vocab_size:
            raise UserError(
                f"config.rl.teacher={self._rl.teacher}: its vocabulary has "
                f"{model.vocab_size} tokens, that of config.model "
                f"{self._cfg.model.vocab_size}; they need the same tokenizer"
            )
        own = dataclasses.replace(self._cfg, model=model)
        return variables, jax.jit(make_score(own, self._rl.segment))

    def _start(self) -> tuple[Any, Any]:
        """The reference: where the run began, or another checkpoint."""
        cfg, path = self._cfg, self._rl.kl_to
        path = cfg.train.init_from if path == START else path
        if not path:
            shapes = jax.eval_shape(lambda: init_state(cfg, optax.identity()))
            where = sharding.state_shardings(self._mesh, shapes)
            first = jax.jit(
                lambda: init_state(cfg, optax.identity()),
                out_shardings=where,
                compiler_options=compile_fast(self._mesh),
            )()
            return {"params": first.params, "balance": first.balance}, self._score
        self._note(f"reading the reference from {path} ...")
        shapes = state_shape(cfg, self._mesh, optax.identity())
        template = {"params": shapes.params, "balance": shapes.balance}
        return read_variables(open_source(path), cfg.model, template), self._score

    def _steps(
        self, state: State, first: int, batches: Sequence[Experience]
    ) -> tuple[State, list[dict[str, Any]], dict[str, jax.Array]]:
        """Optimizer steps on the batches, and what was seen in them."""
        seen: list[dict[str, Any]] = []
        loads: dict[str, jax.Array] = {}
        for step, batch in enumerate(batches, first + 1):
            state, metrics = self._step(step, state, batch)
            seen.append(metrics)
            found = health.expert_loads(metrics["stats"])
            loads = {k: jnp.add(loads[k], x) if loads else x for k, x in found.items()}
        self._step.settle(state)
        return state, [m for m in seen if bool(m["finite"])], loads

    def _record(
        self, state: State, seen: Sequence[dict[str, Any]], loads: Any
    ) -> dict[str, Any]:
        """Fields of a "train" record that supervised steps have too."""
        if not seen:
            return {}
        last, model = seen[-1], self._cfg.model
        return {
            "gradient_norm": mean_of([{"x": m["gradient_norm"]} for m in seen])["x"],
            "groups": last["groups"],
            "layers": health.layer_metrics(model, last["stats"], state.balance),
            "idle_experts": health.idle_experts(model, loads),
        }


def _as_text(placed: Experience) -> Batch:
    return Batch(
        placed.tokens_BT, placed.targets_BT, placed.segment_ids_BT, placed.weights_BT
    )


def _with_ages(one: Trajectory, version: int, groups: int) -> Trajectory:
    """With ages for log-probabilities, so that rows of them can be made.

    0: the policy of now has drawn the token, in a group of this iteration. 1: it has,
    after states that an older policy has left in the cache. 2: an older one drew it.
    """
    carried = one.group < version * groups
    pairs = zip(one.versions, one.logprobs, strict=True)
    ages = [carried if v == version else 2 for v, _ in pairs]
    kept = zip(ages, one.logprobs, strict=True)
    return dataclasses.replace(
        one, logprobs=[float(age) if math.isfinite(x) else x for age, x in kept]
    )


def _mismatch(
    packed: Packed, aged: Packed, scored: Sequence[np.ndarray]
) -> dict[str, float]:
    """How sampler and learner differ on tokens that the policy of now has drawn."""
    rows = zip(packed.batches, aged.batches, scored, strict=True)
    found = [
        (was.behaviour_BT, now_BT, was.weights_BT, age.behaviour_BT)
        for was, age, now_BT in rows
    ]
    was_NBT, now_NBT, weight_NBT, age_NBT = map(np.stack, zip(*found, strict=True))
    numbers: dict[str, float] = {}
    for age, name in ((0, "mismatch"), (1, "mismatch_carried")):
        own_NBT = weight_NBT * (age_NBT == age)
        if own_NBT.any():
            gaps = agreement.agreement(was_NBT, now_NBT, own_NBT)
            numbers |= {name: gaps["gap_mean"], f"{name}_max": gaps["gap_max"]}
    return numbers


def _means(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the steps, under the names of the records."""
    numbers = mean_of(steps)
    if not numbers:
        return {}
    maxima = {
        name: max(float(step[name]) for step in steps)
        for name in numbers
        if name.endswith("_max")
    }
    numbers |= maxima
    numbers["policy_kl"] = numbers.pop("kl_sampler_k3")
    numbers["clip_share"] = numbers["clip_low"] + numbers["clip_high"]
    if "kl_reference" in numbers:
        numbers["reference_kl"] = numbers.pop("kl_reference")
    return numbers
