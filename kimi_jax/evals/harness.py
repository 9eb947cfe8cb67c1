"""A model for lm-evaluation-harness: its three methods, without its package.

    from kimi_jax.evals.harness import Harness, make_lm
    lm = make_lm(Harness(model, variables, tokenizer, max_length=4096))
    lm_eval.simple_evaluate(lm, tasks=["lambada_openai"])

A request is anything with `args`, as the harness's `Instance`. Its conventions hold:
text is preceded by <bos>, contexts that are too long lose their beginning, `until`
strings end a generation and are left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from kimi_jax import config
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.errors import UserError
from kimi_jax.evals.score import Score, Scorer
from kimi_jax.tasks.example import Example


class Request(Protocol):
    @property
    def args(self) -> tuple[Any, ...]: ...


class Writer(Protocol):
    """Greedy or sampled continuations; see `kimi_jax.evals.write`."""

    def __call__(
        self, prompt: Sequence[int], most: int, until: Sequence[str], options: Any
    ) -> str: ...


class Harness:
    """loglikelihood, loglikelihood_rolling and generate_until of one model.

    Args:
      variables: {"params", "balance"}.
      max_length: tokens that the model reads at one time, <bos> included.
      batch_tokens: in one forward pass; a row may be longer.
      write: makes continuations, for `generate_until`.
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
        write: Writer | None = None,
    ):
        self._tokenizer, self._max_length = tokenizer, max_length
        self._scorer = Scorer(model, variables, batch_tokens=batch_tokens, mesh=mesh)
        self._write = write

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log p of the continuation in nats, whether greedy decoding writes it).

        Args:
          requests: args are (context, continuation).
        """
        examples = [self._continuation(*request.args) for request in requests]
        return [(-s.nats, s.complete) for s in self._score(examples)]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """log p of a whole text in nats, its first token given <bos>.

        A text beyond `max_length` is read in windows without overlap, each opened by
        the last token of the one before, so every token counts once.
        """
        windows = [list(self._windows(request.args[0])) for request in requests]
        scores = iter(self._score([w for group in windows for w in group]))
        return [-sum(next(scores).nats for _ in group) for group in windows]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Continuations up to the first of the strings `until`.

        Args:
          requests: args are (context, options): `until`, a string or some, `max_gen_toks`
            (256), `do_sample` (False) and `temperature` (1).

        Raises:
          UserError: the harness was made without `write`, or max_gen_toks leaves no
            room for a context.
        """
        if self._write is None:
            raise UserError("this harness only scores; make it with write=...")
        found = []
        for request in requests:
            context, options = request.args
            most = int(options.get("max_gen_toks", 256))
            room = self._max_length - most
            if room < 1:
                raise UserError(
                    f"max_gen_toks={most}: the model reads at most {self._max_length} "
                    "tokens; lower it"
                )
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            prompt = self._ids(context, first=True)[-room:].tolist()
            found.append(self._write(prompt, most, until, options))
        return found

    def _ids(self, text: str, *, first: bool) -> np.ndarray:
        ids = np.asarray(self._tokenizer.encode(text.encode()), np.int32)
        return np.concatenate([[np.int32(self._tokenizer.bos)], ids]) if first else ids

    def _continuation(self, context: str, continuation: str) -> Example:
        """Encoded apart, with the white space between them on the continuation's side."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        given, asked = self._ids(stripped, first=True), self._ids(continuation, first=False)
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


def cut(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """`text` before the first of the strings `until`, and whether there was one."""
    ends = [at for stop in until if stop and (at := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


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
