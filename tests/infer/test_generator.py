"""Generation agrees with the whole forward pass, and requests with themselves alone."""

import jax
import numpy as np
import pytest

from kimi_jax import sharding
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.pages import CacheFull
from kimi_jax.infer.requests import Ask, Request
from kimi_jax.infer.sampling import Sampling
from kimi_jax.modules import transformer
from tests import tiny
from tests.infer import models

SETTINGS = {
    "slots": 4,
    "length": 64,
    "page_size": 4,
    "read_chunk": 16,
    "decode_steps": 4,
    "routes": True,
}
# Prompt length, tokens wanted, temperature: more than there are slots.
SHAPES = [
    (3, 5, 0.0),
    (40, 7, 1.0),
    (17, 9, 0.0),
    (4, 20, 0.8),
    (21, 3, 0.0),
    (1, 1, 0),
]
REQUESTS = [
    Request(tuple(models.tokens(i, n)), Ask(wanted, Sampling(float(heat)), seed=i))
    for i, (n, wanted, heat) in enumerate(SHAPES)
]


@pytest.fixture(scope="module")
def model():
    return models.hybrid().model


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model, tiny.variables(model), **SETTINGS)


@pytest.fixture(scope="module")
def completions(generator):
    return generator.generate(REQUESTS)


@pytest.fixture(scope="module")
def whole(model):
    """(tokens) -> logits [T, W] of the forward pass without a cache."""
    variables = tiny.variables(model)

    @jax.jit
    def apply(tokens_BT):
        out = transformer.apply(model, variables, tokens_BT)
        return transformer.logits(out.h_BTD[0], out.unembed_DW)

    def run(tokens):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(apply(padded))[: len(tokens)]

    return run


def logprobs_of(logits_TW, tokens, count):
    """Of the last `count` tokens."""
    shifted = logits_TW[-count - 1 : -1].astype(np.float64)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted[np.arange(count), tokens[-count:]], shifted.argmax(-1)


def test_tokens_and_logprobs_are_those_of_the_whole_pass(completions, whole):
    for request, done in zip(REQUESTS, completions, strict=True):
        tokens = [*request.prompt, *done.tokens]
        assert len(done.tokens) == request.ask.max_tokens and done.finished == "length"
        want, best = logprobs_of(whole(tokens), tokens, len(done.tokens))
        # Rounding of float32 over 8 sublayers and a softmax over 272.
        np.testing.assert_allclose(done.logprobs, want, atol=2e-5)
        if request.ask.sampling.temperature == 0:
            np.testing.assert_array_equal(done.tokens, best)
        layers, active = 4, 2
        assert done.routes.shape == (len(tokens) - 1, layers, active)
        assert done.routes.min() >= 0 and done.routes.max() < 4


def test_a_request_does_not_depend_on_the_others(generator, completions):
    for request, done in zip(REQUESTS, completions, strict=True):
        (alone,) = generator.generate([request])
        assert alone.tokens == done.tokens
        np.testing.assert_allclose(alone.logprobs, done.logprobs, atol=1e-5)
        np.testing.assert_array_equal(alone.routes, done.routes)
    assert generator.pager.in_use() == 0


def test_a_conversation_is_never_read_again(generator, whole):
    """Fork, continue each branch, add what a tool said, go on; then the log-probs."""
    root = generator.open(models.tokens(9, 22))
    branches = generator.fork(root, 3)
    # All pages are shared, also the sixth, which is part full.
    assert generator.pager.in_use() == 6
    generator.close(root)
    assert generator.pager.in_use() == 6
    asks = [(b, Ask(4, Sampling(1.0), seed=i)) for i, b in enumerate(branches)]
    drawn = {i: [] for i in range(3)}
    for turn in range(2):
        for piece in generator.extend(asks):
            drawn[piece.number] += piece.logprobs
        for i, branch in enumerate(branches):
            generator.append(branch, models.tokens(turn, 1 + 5 * i))
    assert len({tuple(b.tokens[22:26]) for b in branches}) == 3
    for i, branch in enumerate(branches):
        tool = 1 + 5 * i
        logits = whole(branch.tokens)
        for turn, end in enumerate((26, 30 + tool)):
            want, _ = logprobs_of(logits[:end], branch.tokens[:end], 4)
            got = drawn[i][4 * turn : 4 * turn + 4]
            np.testing.assert_allclose(got, want, atol=2e-5)
        assert len(np.concatenate(branch.routes)) == branch.read
        generator.close(branch)
    assert generator.pager.in_use() == 0


def test_a_fork_does_not_see_what_its_source_writes_behind_the_shared_part(generator):
    """21 tokens are read, six pages of four: both write to the place of the 22nd."""
    root = generator.open(models.tokens(9, 22))
    (fork,) = generator.fork(root, 1)
    one, other = (Ask(4, Sampling(1.0), seed=seed) for seed in (0, 1))
    list(generator.extend([(root, other)]))
    list(generator.extend([(fork, one)]))
    forked = fork.tokens
    for sequence in (root, fork):
        generator.close(sequence)
    (alone,) = generator.generate([Request(tuple(forked[:22]), one)])
    assert forked[22:] == alone.tokens and root.tokens != forked
    assert generator.pager.in_use() == 0


def test_a_snapshot_goes_on_exactly(generator):
    ask = Ask(6, Sampling(0.7), seed=3)
    other = generator.open([1])  # holds the slot that comes first
    first = generator.open(models.tokens(4, 19))
    generator.read([first])
    saved = generator.save(first)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(saved[3:]))
    (*_, piece) = generator.extend([(first, ask)])
    generator.close(first)
    generator.close(other)
    again = generator.load(saved)
    assert again.slot != first.slot and again.read == 18
    list(generator.extend([(again, ask)]))
    assert again.tokens == first.tokens
    np.testing.assert_array_equal(piece.routes, np.concatenate(again.routes))
    generator.close(again)


def test_stop_sequences_end_a_request_where_they_end(generator, completions):
    request, done = REQUESTS[2], completions[2]
    pair = tuple(done.tokens[4:6])
    end = next(i for i in range(2, 10) if tuple(done.tokens[i - 2 : i]) == pair)
    ask = Ask(9, request.ask.sampling, ((300 - 29, 5), pair), request.ask.seed)
    (stopped,) = generator.generate([Request(request.prompt, ask)])
    assert stopped.finished == "stop" and stopped.tokens == done.tokens[:end]


def test_pieces_stream_and_leaving_early_frees_all(generator):
    stream = generator.stream(REQUESTS)
    seen = [next(stream) for _ in range(3)]
    assert all(1 <= len(piece.tokens) <= 4 for piece in seen)
    stream.close()
    assert generator.pager.in_use() == 0 and len(generator.free_slots()) == 4


@pytest.mark.parametrize(
    ("prompt", "ask", "message"),
    [
        ((), {}, "request 0: no tokens; a prompt begins with at least one"),
        ((1, 272), {}, "token 272 is not in the vocabulary of 272"),
        ((1,) * 60, {}, "60 tokens and 5 more do not fit into 64"),
        ((1,), {"stop": ((3, 400),)}, r"stop sequence \(3, 400\): token 400"),
    ],
)
def test_unfit_requests_are_refused_before_any_begins(generator, prompt, ask, message):
    request = Request(prompt, Ask(5, **ask))
    with pytest.raises(UserError, match=message):
        generator.generate([request, REQUESTS[0]])
    assert generator.pager.in_use() == 0


def test_sequences_have_to_fit_and_to_live(generator):
    live = [generator.open([1, 2], room=62) for _ in range(3)]
    with pytest.raises(CacheFull, match="2 forks need as many slots, and 1 are free"):
        generator.fork(live[0], 2)
    with pytest.raises(UserError, match="no tokens"):
        generator.append(live[0], [])
    live.append(generator.open([1]))
    with pytest.raises(CacheFull, match="all 4 slots are taken"):
        generator.open([1])
    for sequence in live:
        generator.close(sequence)
    with pytest.raises(UserError, match="was closed"):
        generator.append(live[0], [1])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"slots": 0}, "slots=0: must be at least 1"),
        ({"decode_steps": 0}, "decode_steps=0"),
        ({"page_size": -4}, "page_size=-4"),
    ],
)
def test_unfit_sizes_are_refused(model, setting, message):
    with pytest.raises(UserError, match=message):
        Generator(model, {}, **{**SETTINGS, **setting})


@pytest.mark.parametrize("ask", [{"max_tokens": 0}, {"max_tokens": 1, "stop": ((),)}])
def test_unfit_asks_are_refused(ask):
    with pytest.raises(UserError, match=r"max_tokens=0|has 0 tokens"):
        Ask(**ask)


def test_eight_devices_equal_one(completions):
    """Rows, pages and experts, heads: each over two."""
    cfg = models.hybrid("mesh.data=2", "mesh.context=2", "mesh.tensor=2")
    mesh = sharding.make_mesh(cfg)
    variables = tiny.variables(cfg.model)
    variables = jax.device_put(variables, sharding.state_shardings(mesh, variables))
    generator = Generator(cfg.model, variables, mesh=mesh, **SETTINGS)
    for one, many in zip(completions, generator.generate(REQUESTS), strict=True):
        assert many.tokens == one.tokens
        np.testing.assert_allclose(many.logprobs, one.logprobs, atol=2e-5)
        np.testing.assert_array_equal(many.routes, one.routes)
    root = generator.open(REQUESTS[0].prompt)
    (branch,) = generator.fork(root, 1)
    list(generator.extend([(branch, REQUESTS[0].ask)]))
    assert branch.tokens[3:] == completions[0].tokens
    with pytest.raises(CacheFull, match="where the sequence lies"):
        generator.fork(root, 1)
