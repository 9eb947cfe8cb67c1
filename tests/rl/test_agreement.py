"""Sampler and learner agree on a conversation; experts are replayed layer by layer."""

import functools

import jax
import numpy as np
import pytest

from kimi_jax.infer.generator import Generator
from kimi_jax.infer.program import routes_shape
from kimi_jax.infer.requests import Ask
from kimi_jax.infer.sampling import Sampling
from kimi_jax.rl.agreement import agreement, routing_overlap
from kimi_jax.rl.experience import make_experience
from kimi_jax.rl.step import make_score
from tests import tiny
from tests.infer import models
from tests.infer.test_generator import SETTINGS
from tests.rl.trajectories import Trajectory, Turn

EXPERTS = 4
T = 64


@pytest.fixture(scope="module")
def cfg():
    return models.hybrid()


@pytest.fixture(scope="module")
def score(cfg):
    variables = tiny.variables(cfg.model)
    run = jax.jit(make_score(cfg))

    def of(experience):
        found = run(variables["params"], variables["balance"], experience)
        return [np.asarray(x) for x in found]

    return of


@functools.cache
def conversation():
    """Two branches of one prompt: three turns each, answers of 1 and 19 tokens."""
    model = models.hybrid().model
    generator = Generator(model, tiny.variables(model), **SETTINGS)
    root = generator.open(models.tokens(3, 7))
    branches = [root, *generator.fork(root, 1)]
    made = [Trajectory(0, [], [], []) for _ in branches]
    for turn in range(3):
        asks = [(b, Ask(5, Sampling(1.0), seed=i)) for i, b in enumerate(branches)]
        starts = [len(b.tokens) for b in branches]
        for piece in generator.extend(asks):
            made[piece.number].logprobs += piece.logprobs
        for one, branch, start in zip(made, branches, starts, strict=True):
            one.turns.append(Turn(start, len(branch.tokens), 0.0))
            if turn < 2:
                generator.append(branch, models.tokens(turn, 1 if turn else 19))
    for one, branch in zip(made, branches, strict=True):
        one.tokens = list(branch.tokens)
        one.routes = np.concatenate(branch.routes)
    return made


@pytest.fixture(scope="module")
def experience(cfg):
    replay = (*routes_shape(cfg.model), EXPERTS)
    packed = make_experience(conversation(), [1.0, -1.0], T, 2, replay=replay)
    assert len(packed.used) == 2
    return packed.batches[0]


@pytest.mark.slow
def test_log_probabilities_agree_over_turns(experience, score):
    """To 1e-4 in float32, tokens of tools among them; and they choose one expert."""
    for replayed in (True, False):
        batch = experience
        if not replayed:
            free = np.full_like(batch.routes_BTLA, EXPERTS)
            batch = batch._replace(routes_BTLA=free)
        logprob_BT, entropy_BT, routes_BTLA = score(batch)
        found = agreement(batch.behaviour_BT, logprob_BT, batch.weights_BT)
        assert 0 < found["gap_max"] < 1e-4 and abs(found["kl_k1"]) < 1e-5
        assert batch.weights_BT.sum() == 30
        assert entropy_BT.min() > 0 and entropy_BT.max() < np.log(272)
        overlap = routing_overlap(experience.routes_BTLA, routes_BTLA, EXPERTS)
        assert overlap["slots"] == 1.0 if replayed else overlap["slots"] > 0.99


@pytest.mark.slow
def test_given_experts_are_used_layer_by_layer(experience, score):
    rng = np.random.default_rng(0)
    given = rng.random((*experience.routes_BTLA.shape[:3], EXPERTS)).argsort(-1)
    given = given[..., :2].astype(np.int32)
    free_BT = rng.random(given.shape[:2]) < 0.3
    given[free_BT] = EXPERTS
    own = score(experience._replace(routes_BTLA=np.full_like(given, EXPERTS)))
    logprob_BT, _, used = score(experience._replace(routes_BTLA=given))
    real_BT = experience.segment_ids_BT > 0
    replayed = real_BT & ~free_BT
    np.testing.assert_array_equal(used[replayed], given[replayed])
    assert (used[real_BT] < EXPERTS).all() and (used[~real_BT] == EXPERTS).all()
    # The first layer sees what it always saw, and chooses as ever where it may.
    here = real_BT & free_BT
    np.testing.assert_array_equal(used[here, 0], own[2][here, 0])
    assert np.abs(logprob_BT - own[0])[replayed].max() > 1e-3


def test_gaps_and_overlaps_of_known_numbers():
    p, q = np.log([[0.5, 0.2, 0.9]]), np.log([[0.25, 0.4, 0.1]])
    found = agreement(p, q, np.array([[1, 1, 0]]))
    np.testing.assert_allclose(found["gap_mean"], np.log(2))
    np.testing.assert_allclose(found["gap_max"], np.log(2))
    np.testing.assert_allclose(found["kl_k1"], 0, atol=1e-15)
    np.testing.assert_allclose(found["kl_k3"], (0.5 - 1 + 2 - 1) / 2)
    assert agreement(p, q, np.zeros((1, 3)))["gap_max"] == 0
    sampler = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 4]], [[4, 4], [4, 4]]])
    learner = np.array([[[1, 0], [2, 3]], [[0, 2], [2, 1]], [[0, 1], [2, 3]]])
    found = routing_overlap(sampler, learner, 4)
    assert found == {"slots": 6 / 7, "tokens": 0.5}
    assert routing_overlap(sampler[2:], learner[2:], 4) == {"slots": 1, "tokens": 1}
