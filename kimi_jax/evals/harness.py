"""A model for lm-evaluation-harness: its three methods, without its package.

    from kimi_jax.evals.harness import Harness, make_lm
    lm = make_lm(Harness(model, variables, tokenizer, max_length=4096))
    lm_eval.simple_evaluate(lm, tasks=["lambada_openai"])

A request is anything with `args`, as the harness's `Instance`. Its conventions hold:
text is preceded by <bos>, contexts that are too long lose their beginning, `until`
strings end a generation and are left out of it. An empty context is <bos> alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from kimi_jax import config
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError
from kimi_jax.evals.score import Score, Scorer
from kimi_jax.infer import requests
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.sampling import Sampling
from kimi_jax.tasks.example import Example


class Request(Protocol):
    @property
    def args(self) -> tuple[Any, ...]: ...


class Harness:
    """loglikelihood, loglikelihood_rolling and generate_until of one model.

    Args:
      variables: {"params", "balance"}.
      max_length: tokens that the model reads at one time, <bos> included.
      batch_tokens: in one forward pass; a row may be longer.
      slots: sequences that are generated at one time.
    """

    def __init__(
        self,
        model: config.Model,
        variables: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_tokens: int = 16_384,
        mesh: jax.sharding.Mesh | None = None,
        slots: int = 8,
    ):
        self._model, self._variables, self._mesh = model, variables, mesh
        self._tokenizer, self._max_length, self._slots = tokenizer, max_length, slots
        self._scorer = Scorer(model, variables, batch_tokens=batch_tokens, mesh=mesh)

    def loglikelihood(self, asked: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log p of the continuation in nats, whether greedy decoding writes it).

        Args:
          asked: args are (context, continuation).
        """
        examples = [self._continuation(*request.args) for request in asked]
        return [(-s.nats, s.complete) for s in self._score(examples)]

    def loglikelihood_rolling(self, asked: Sequence[Request]) -> list[float]:
        """log p of a whole text in nats, its first token given <bos>.

        A text beyond `max_length` is read in windows without overlap, each opened by
        the last token of the one before, so every token counts once.
        """
        windows = [list(self._windows(request.args[0])) for request in asked]
        scores = iter(self._score([w for group in windows for w in group]))
        return [-sum(next(scores).nats for _ in group) for group in windows]

    def generate_until(self, asked: Sequence[Request]) -> list[str]:
        """Continuations up to the first of the strings `until`, or to <eod>.

        Args:
          asked: args are (context, options): `until`, a string or some; max_gen_toks
            (256); do_sample (False: the likeliest tokens) and temperature (1).

        Raises:
          UserError: max_gen_toks leaves no room for a context.
        """
        made = [self._ask(i, *request.args) for i, request in enumerate(asked)]
        drawn = self._generator.generate([request for request, _ in made])
        return [
            cut(self._tokenizer.decode(done.tokens), until)
            for done, (_, until) in zip(drawn, made, strict=True)
        ]

    @functools.cached_property
    def _generator(self) -> Generator:
        tokenizer = self._tokenizer
        allowed = np.arange(self._model.vocab_size) < tokenizer.vocab_size
        allowed[[tokenizer.bos, tokenizer.pad]] = False
        allowed[tokenizer.eod] = True
        return Generator(
            self._model,
            self._variables,
            slots=self._slots,
            length=self._max_length,
            mesh=self._mesh,
            allowed=allowed,
        )

    def _ask(
        self, seed: int, context: str, options: Mapping[str, Any]
    ) -> tuple[requests.Request, list[str]]:
        """The request, and the strings that end its text."""
        most = int(options.get("max_gen_toks", 256))
        room = self._max_length - most
        if most < 1 or room < 1:
            raise UserError(
                f"max_gen_toks={most}: the model reads at most {self._max_length} "
                "tokens, context included; choose a number between"
            )
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        temperature = float(options.get("temperature", 1.0))
        sampling = Sampling(temperature if options.get("do_sample") else 0.0)
        # Tokens that spell a stop otherwise are found in the text, only later.
        spelt = [tuple(self._ids(text, first=False).tolist()) for text in until]
        stops = [(self._tokenizer.eod,), *spelt][: requests.MAX_STOPS]
        stops = [s for s in stops if 1 <= len(s) <= requests.MAX_STOP_TOKENS]
        prompt = tuple(self._ids(context, first=True)[-room:].tolist())
        ask = requests.Ask(most, sampling, tuple(stops), seed)
        return requests.Request(prompt, ask), until

    def _ids(self, text: str, *, first: bool) -> np.ndarray:
        ids = np.asarray(self._tokenizer.encode(text.encode()), np.int32)
        return np.concatenate([[np.int32(self._tokenizer.bos)], ids]) if first else ids

    def _continuation(self, context: str, continuation: str) -> Example:
        """Encoded apart; white space between them goes with the continuation."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        given, asked = (
            self._ids(stripped, first=True),
            self._ids(continuation, first=False),
        )
        if not len(asked):
            raise UserError("a continuation is empty; ask for at least one token")
        if len(asked) > self._max_length:
            raise UserError(
                f"a continuation has {len(asked)} tokens, the model reads at most "
                f"{self._max_length}; raise config.evaluation.max_length"
            )
        ids = np.concatenate([given, asked])[-(self._max_length + 1) :]
        return _asking(ids, len(asked))

    def _windows(self, text: str) -> Iterator[Example]:
        ids = self._ids(text, first=True)
        for start in range(0, len(ids) - 1, self._max_length):
            window = ids[start : start + self._max_length + 1]
            yield _asking(window, len(window) - 1)

    def _score(self, examples: Sequence[Example]) -> list[Score]:
        """Scores in order; passes hold instances of one power of two of length."""
        groups: dict[int, list[int]] = {}
        for i, example in enumerate(examples):
            size = max(16, 1 << (len(example.tokens_T) - 1).bit_length())
            groups.setdefault(min(size, self._max_length), []).append(i)
        found: dict[int, Score] = {}
        for length, members in groups.items():
            group = [examples[i] for i in members]
            found |= zip(members, self._scorer.score(group, length=length), strict=True)
        return [found[i] for i in range(len(examples))]


def cut(text: str, until: Sequence[str]) -> str:
    """`text` before the first of the strings `until`."""
    ends = [at for stop in until if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def make_lm(harness: Harness) -> Any:
    """`harness` as an `lm_eval.api.model.LM`.

    Raises:
      UserError: the package lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UserError(
            "lm-evaluation-harness is not installed; run `pip install lm_eval`"
        ) from error

    class Adapter(LM):
        def loglikelihood(self, requests: Any, **_: Any) -> Any:
            return harness.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            return harness.loglikelihood_rolling(requests)

        def generate_until(self, requests: Any, **_: Any) -> Any:
            return harness.generate_until(requests)

    return Adapter()


def _asking(ids: np.ndarray, asked: int) -> Example:
    """Inputs ids[:-1]; the last `asked` ids are the labels, one answer."""
    labels_T = ids[1:].astype(np.int32)
    answers_T = np.full(len(labels_T), -1, np.int32)
    answers_T[len(labels_T) - asked :] = 0
    return Example(ids[:-1].astype(np.int32), labels_T, answers_T)
