"""The measurement of one cell."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import Config
from kimi_jax.data import loader
from kimi_jax.data.loader import EvalBatches
from kimi_jax.evals import speed
from kimi_jax.evals.cells import SPEED, TEXT, Cell
from kimi_jax.evals.score import Scorer
from kimi_jax.infer.sampling import Sampling
from kimi_jax.rl import health, players
from kimi_jax.rl.task_sampler import held_out
from kimi_jax.sharding import row_shards
from kimi_jax.tasks.example import digest, draw
from kimi_jax.train.evaluate import evaluate_length
from kimi_jax.train.step import State

Record = dict[str, Any]
Done = Callable[[int], None]


class Measure:
    """cell -> record, for one model on one mesh.

    Args:
      variables: {"params", "balance"} on `mesh`.
      tokens: folder for the token stores of the held-out text.
    """

    def __init__(
        self,
        cfg: Config,
        variables: Any,
        mesh: jax.sharding.Mesh,
        tokens: pathlib.Path,
    ):
        self._cfg, self._variables, self._mesh = cfg, variables, mesh
        self._tokens = tokens
        self._scorer = Scorer(
            cfg.model,
            variables,
            batch_tokens=cfg.evaluation.batch_tokens,
            mesh=mesh,
        )

    def __call__(self, cell: Cell, done: Done = lambda count: None) -> Record:
        """The numbers of a cell; `done` is told of finished rows on the way.

        Returns:
          task, spec, length, dials, seconds; and of a task family, examples, digest (of
          the instances), accuracy (share of the answers that are right, mean over
          instances) and its standard error, completed (share of instances with all
          answers right), loss (nats a label); of an environment, success, its standard
          error, and `health.rollout_health`; of text see `evaluate_length`; of speed
          `speed.measure`.
        """
        started = time.monotonic()
        kinds = {TEXT: self._text, SPEED: self._speed}
        measured = self._episodes if cell.world is not None else self._task
        numbers = kinds.get(cell.spec.name, measured)(cell, done)
        about = {
            "task": cell.spec.name,
            "spec": cell.name,
            "length": cell.length,
            "dials": cell.dials,
        }
        return about | numbers | {"seconds": time.monotonic() - started}

    def _task(self, cell: Cell, done: Done) -> Record:
        evaluation, task = self._cfg.evaluation, cell.task
        assert task is not None
        examples = [
            draw(task, evaluation.seed, "evaluation", i)
            for i in range(evaluation.examples)
        ]
        scores = self._scorer.score(examples, length=cell.length, done=done)
        share_N = np.array([s.right / s.answers for s in scores])
        labels = sum(s.labels for s in scores)
        return {
            "family": task.family,
            "examples": len(scores),
            "digest": digest(examples),
            "accuracy": float(share_N.mean()),
            "accuracy_error": float(share_N.std() / math.sqrt(len(share_N))),
            "completed": float(np.mean([s.complete for s in scores])),
            "loss": sum(s.nats for s in scores) / labels,
        }

    def _episodes(self, cell: Cell, done: Done) -> Record:
        cfg, evaluation = self._cfg, self._cfg.evaluation
        assert cell.world is not None and cfg.rl is not None
        # The expert needs `length` tokens, and a policy may go astray.
        most = max(cfg.rl.max_tokens, cell.length * 5 // 4)
        slots = min(cfg.rl.slots, evaluation.examples)
        rows = row_shards(self._mesh)
        limits = dataclasses.replace(
            cfg.rl, max_tokens=most, slots=-(-slots // rows) * rows
        )
        cfg = dataclasses.replace(cfg, rl=limits)
        world = players.make_world(cfg, [str(cell.world)])
        tasks = held_out(world.cells, evaluation.examples, evaluation.seed)
        sampling = Sampling(cell.spec.dials["temperature"])
        played = players.play(cfg, world, self._variables, self._mesh, tasks, sampling)
        done(len(played))
        won_N = np.array([trajectory.success for trajectory in played])
        prompts = json.dumps([world.environment(t).reset(t) for t in tasks])
        return {
            "family": "episodes",
            "examples": len(played),
            "digest": hashlib.sha256(prompts.encode()).hexdigest()[:12],
            "success_error": float(won_N.std() / math.sqrt(len(won_N))),
            **health.rollout_health(played, 0),
        }

    @functools.cached_property
    def _data(self) -> loader.Data:
        return loader.load_data(self._cfg, self._tokens)

    def _text(self, cell: Cell, done: Done) -> Record:
        data, source = self._data, cell.spec.dials["source"]
        assert isinstance(data.validation, EvalBatches)
        one = (data.validation.sources[source],)
        only = dataclasses.replace(data.validation, sources=one)
        step = jnp.zeros((), jnp.int32)
        variables = self._variables
        state = State(step, variables["params"], variables["balance"], ())
        record = evaluate_length(
            self._cfg,
            data._replace(validation=only),
            self._mesh,
            state,
            cell.spec.dials["multiple"],
        )
        title = self._cfg.data.sources[source] or "Shakespeare's plays"
        identity = data.identity[f"source {source}"]
        return {"family": "language", "source": title, "digest": identity} | record

    def _speed(self, cell: Cell, done: Done) -> Record:
        numbers = speed.measure(
            self._cfg.model, self._variables, mesh=self._mesh, **cell.spec.dials
        )
        return {"family": "speed"} | numbers
