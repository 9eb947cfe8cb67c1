"""lm-evaluation-harness's protocol, by a task made on the spot, without its package."""

import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.data.tokenizer import ByteTokenizer, SymbolTokenizer
from kimi_jax.errors import UserError
from kimi_jax.evals.harness import Harness, cut, make_lm
from kimi_jax.modules import transformer
from tests import tiny

MODEL = tiny.make(
    "model.num_layers=1",
    "model.attention=gqa",
    "model.ffn.num_dense_layers=1",
    "model.residual.block_size=1",
).model
BYTES, SYMBOLS = ByteTokenizer(), SymbolTokenizer(260)
LENGTH = 16


class Instance(NamedTuple):
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def variables():
    return tiny.variables(MODEL)


@pytest.fixture(scope="module")
def harness(variables):
    return Harness(MODEL, variables, BYTES, max_length=LENGTH, batch_tokens=64)


@pytest.fixture(scope="module")
def writer(variables):
    return Harness(MODEL, variables, SYMBOLS, max_length=LENGTH, slots=2)


@pytest.fixture(scope="module")
def log_p(variables):
    """(ids, first asked) -> log p of the ids from there on, given those before."""

    @jax.jit
    def logits(tokens_BT, segment_ids_BT):
        out = transformer.apply(MODEL, variables, tokens_BT, segment_ids_BT)
        return out.h_BTD[0] @ out.unembed_DW

    def measure(ids: list[int], first: int) -> float:
        padded = (
            jnp.zeros((1, LENGTH), jnp.int32)
            .at[0, : len(ids) - 1]
            .set(jnp.array(ids[:-1]))
        )
        inside = (jnp.arange(LENGTH) < len(ids) - 1).astype(jnp.int32)[None]
        logits_TW = np.asarray(logits(padded, inside), np.float64)
        log_p_TW = logits_TW - np.log(np.exp(logits_TW).sum(axis=1, keepdims=True))
        return sum(log_p_TW[t - 1, ids[t]] for t in range(first, len(ids)))

    return measure


def encode(text: str) -> list[int]:
    return BYTES.encode(text.encode()).tolist()


def test_a_multiple_choice_task(harness, log_p) -> None:
    """Two questions with choices of different lengths; the likeliest choice wins."""
    questions = [("1+1=", ["2", "three", "44"]), ("sky: ", ["blue", "x"])]
    asked = [Instance((q, c)) for q, choices in questions for c in choices]
    found = harness.loglikelihood(asked)
    for (context, choice), (value, greedy) in zip(
        (a.args for a in asked), found, strict=True
    ):
        given = [BYTES.bos, *encode(context.rstrip())]
        ids = given + encode(context[len(context.rstrip()) :] + choice)
        assert value == pytest.approx(log_p(ids, len(given)), rel=1e-4)
        assert not greedy
    assert harness.loglikelihood([Instance(("a ", "b"))]) == harness.loglikelihood(
        [Instance(("a", " b"))]
    )


def test_long_contexts_lose_their_beginning(harness, log_p) -> None:
    ids = [BYTES.bos, *encode("0123456789abcdefghij")]
    (found,) = harness.loglikelihood([Instance(("0123456789abcdef", "ghij"))])
    kept = ids[-(LENGTH + 1) :]
    assert found[0] == pytest.approx(log_p(kept, len(kept) - 4), rel=1e-4)
    with pytest.raises(UserError, match="20 tokens, the model reads at most 16"):
        harness.loglikelihood([Instance(("", "x" * 20))])
    with pytest.raises(UserError, match="continuation is empty"):
        harness.loglikelihood([Instance(("a", ""))])


def test_a_rolling_text_counts_every_token_once(harness, log_p) -> None:
    texts = ["short", "a text that is longer than two windows of it"]
    found = harness.loglikelihood_rolling([Instance((text,)) for text in texts])
    for text, value in zip(texts, found, strict=True):
        ids = [BYTES.bos, *encode(text)]
        windows = [ids[i : i + LENGTH + 1] for i in range(0, len(ids) - 1, LENGTH)]
        assert value == pytest.approx(sum(log_p(w, 1) for w in windows), rel=1e-4)


@pytest.mark.slow
def test_generation_is_what_scoring_calls_greedy(writer) -> None:
    """All labels being likeliest and greedy generation are one and the same."""
    options = {"max_gen_toks": 5}
    contexts = ["3 17 4", "250", "8 8 8 8"]
    texts = writer.generate_until([Instance((c, options)) for c in contexts])
    for context, text in zip(contexts, texts, strict=True):
        words = text.split()
        assert 1 <= len(words) <= 5
        other = [*words[:-1], str((int(words[-1]) + 1) % 260)]
        (same, changed) = writer.loglikelihood(
            [
                Instance((context, " " + text)),
                Instance((context, " " + " ".join(other))),
            ]
        )
        assert same[1] and not changed[1]
        assert same[0] > changed[0]
    stop = texts[0].split()[1]
    (short,) = writer.generate_until(
        [Instance((contexts[0], {**options, "until": [f" {stop}", "259 259"]}))]
    )
    assert short == cut(texts[0], [f" {stop}"]) != texts[0]
    with pytest.raises(UserError, match="max_gen_toks=16: the model reads at most 16"):
        writer.generate_until([Instance(("1", {"max_gen_toks": 16}))])


def test_the_package_is_needed_for_its_own_class_alone(harness, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        make_lm(harness)

    class LM:
        pass

    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].LM = LM  # type: ignore[attr-defined]
    lm = make_lm(harness)
    assert isinstance(lm, LM)
    asked = [Instance(("ab", "c"))]
    assert lm.loglikelihood(asked, disable_tqdm=True) == harness.loglikelihood(asked)
    assert lm.loglikelihood_rolling([Instance(("ab",))])
