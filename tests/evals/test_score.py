"""Scores against whole logits in numpy, whole passes against chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import sharding
from kimi_jax.evals.score import Scorer
from kimi_jax.modules import transformer
from kimi_jax.tasks.example import Example, draw
from kimi_jax.tasks.specs import make, parse
from tests import tiny
from tests.tasks.test_tasks import TEXT

# One recurrent and one softmax layer are enough for what happens around them.
OVERRIDES = (
    "model.num_layers=2",
    "model.attention=kda,mla",
    "model.ffn.num_dense_layers=2",
    "model.residual.block_size=1",
)
MODEL = tiny.make(*OVERRIDES).model
LENGTH = 40


@pytest.fixture(scope="module")
def variables():
    return tiny.variables(MODEL)


@pytest.fixture(scope="module")
def examples():
    """Instances of several lengths, with one label an answer and with several."""
    tasks = [
        make(parse(f"palindrome:length={LENGTH}:items=6")[0], TEXT),
        make(parse("stack:length=23")[0], TEXT),
        make(parse("permutations:length=9")[0], TEXT),
    ]
    found = [draw(task, 0, "evaluation", i) for task in tasks for i in range(2)]
    pairs = found[0].answers_T // 2  # the six symbols as three answers
    return [*found, found[0]._replace(answers_T=pairs)]


def reference(variables, example: Example) -> tuple[int, int, float]:
    """(answers, right ones, nats) by a pass of this instance alone, position by
    position."""
    tokens = jnp.asarray(example.tokens_T)
    padded = jnp.zeros(LENGTH, jnp.int32).at[: len(tokens)].set(tokens)[None]
    segments = (jnp.arange(LENGTH) < len(tokens)).astype(jnp.int32)[None]
    out = _apply(variables, padded, segments)
    logits_TW = np.asarray(out.h_BTD[0], np.float64) @ np.asarray(out.unembed_DW)
    nats, right = 0.0, {}
    for t in np.flatnonzero(example.asked_T):
        label, answer = example.labels_T[t], int(example.answers_T[t])
        logits_W = logits_TW[t]
        nats += np.log(np.exp(logits_W - logits_W.max()).sum())
        nats += logits_W.max() - logits_W[label]
        right[answer] = right.get(answer, True) and logits_W.argmax() == label
    return len(right), sum(right.values()), nats


_apply = jax.jit(
    lambda v, tokens, segments: transformer.apply(MODEL, v, tokens, segments)
)


def greedy(variables, example: Example) -> Example:
    """The instance with labels that the model finds likeliest at every position."""
    tokens = jnp.asarray(example.tokens_T)[None]
    padded = jnp.zeros((1, LENGTH), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
    out = _apply(variables, padded, jnp.ones((1, LENGTH), jnp.int32))
    best_T = np.asarray(jnp.argmax(out.h_BTD[0] @ out.unembed_DW, axis=-1))
    return example._replace(labels_T=best_T[: tokens.shape[1]].astype(np.int32))


@pytest.mark.slow
def test_scores_are_those_of_single_passes(variables, examples) -> None:
    mixed = [*examples, greedy(variables, examples[0])]
    scores = Scorer(MODEL, variables, batch_tokens=3 * LENGTH).score(mixed)
    for score, example in zip(scores, mixed, strict=True):
        answers, right, nats = reference(variables, example)
        assert (score.answers, score.right) == (answers, right)
        assert score.labels == example.asked_T.sum()
        assert score.nats == pytest.approx(nats, rel=1e-5)
    assert scores[-1].complete and not scores[0].complete


@pytest.mark.slow
def test_long_rows_in_chunks_score_the_same(variables, examples) -> None:
    mixed = [*examples[:3], greedy(variables, examples[0])]
    told: list[int] = []
    whole = Scorer(MODEL, variables, batch_tokens=4096).score(mixed, length=LENGTH)
    chunks = Scorer(MODEL, variables, batch_tokens=16)  # 40 tokens are three chunks
    scores = chunks.score(mixed, length=LENGTH, done=told.append)
    assert told == [1, 2, 3, 4]
    for a, b in zip(scores, whole, strict=True):
        assert a[:3] == b[:3]
        assert a.nats == pytest.approx(b.nats, rel=1e-4)


@pytest.mark.slow
def test_a_mesh_changes_nothing(variables, examples) -> None:
    cfg = tiny.make(*OVERRIDES, "mesh.data=2", "mesh.context=2")
    mesh = sharding.make_mesh(cfg)
    placed = jax.device_put(variables, sharding.state_shardings(mesh, variables))
    single = Scorer(MODEL, variables, batch_tokens=4096).score(examples[:3])
    spread = Scorer(MODEL, placed, batch_tokens=4096, mesh=mesh).score(examples[:3])
    for a, b in zip(spread, single, strict=True):
        assert a[:3] == b[:3]
        assert a.nats == pytest.approx(b.nats, rel=1e-5)


def test_rows_of_a_pass() -> None:
    scorer = Scorer(MODEL, {}, batch_tokens=100)
    assert [scorer.rows(n) for n in (10, 60, 1000)] == [10, 1, 1]
    assert scorer.score([]) == []
