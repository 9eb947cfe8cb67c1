"""Generation: sequences continued by the model, and requests served from a queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kimi_jax import config
from kimi_jax.errors import UserError
from kimi_jax.infer import program
from kimi_jax.infer.requests import (
    MAX_STOP_TOKENS,
    Ask,
    Completion,
    Piece,
    Request,
    ends,
    stop_arrays,
)
from kimi_jax.infer.sampling import make_knobs
from kimi_jax.infer.slots import Live, Slots


@dataclasses.dataclass(eq=False)
class Job:
    """A sequence while the model writes it.

    Attributes:
      drawn: what it has written for this ask; the last tokens of the sequence.
    """

    sequence: Live
    ask: Ask
    number: int = 0  # of its pieces
    drawn: list[int] = dataclasses.field(default_factory=list)


class Generator(Slots):
    """Continues sequences of one model.

    The methods of `Slots` open, fork and close sequences and give them tokens from
    outside; `extend` lets the model write. `stream` and `generate` do all of it for a
    list of requests, any number of them. They are loops of `start` and `advance`, with
    which jobs may join and leave between any two calls.

    Args:
      decode_steps: K, most tokens that a call draws for a row before the host looks.
      allowed: bool [vocab_size], tokens that may be drawn; None: all.
      others: see `Slots`.
    """

    def __init__(
        self,
        model: config.Model,
        variables: Any,
        *,
        decode_steps: int = 16,
        allowed: np.ndarray | None = None,
        **slots: Any,
    ):
        super().__init__(model, variables, **slots)
        if decode_steps < 1:
            raise UserError(f"decode_steps={decode_steps}: must be at least 1")
        self._steps = decode_steps
        allowed = np.ones(model.vocab_size, bool) if allowed is None else allowed
        self._allowed = np.asarray(allowed, bool)

    def extend(self, asks: Sequence[tuple[Live, Ask]]) -> Iterator[Piece]:
        """Continue sequences, all at once; the tokens are added to them as they come.

        Raises:
          UserError: unknown stop tokens, or more tokens than fit.
        """
        jobs = []
        for index, (sequence, ask) in enumerate(asks):
            jobs.append(self.start(sequence, ask, number=index))
        while jobs:
            for job, piece in self.advance(jobs):
                if piece.finished:
                    jobs.remove(job)
                yield _with_routes(piece, job.sequence)

    def start(
        self,
        sequence: Live,
        ask: Ask,
        *,
        number: int = 0,
        drawn: Sequence[int] = (),
    ) -> Job:
        """Have a sequence continued by the next `advance` that is given the job.

        Pages for the longest continuation are taken now. A job ends with the piece that
        says so, or whenever it is no longer given.

        Args:
          drawn: what was written for this ask before; the sequence ends with it.

        Raises:
          UserError: unknown stop tokens, or more tokens than fit.
        """
        self._check_live(sequence)
        before = len(sequence.tokens) - len(drawn)
        self._check_ask(before, ask)
        self.reserve(sequence, before + ask.max_tokens)
        return Job(sequence, ask, number, list(drawn))

    def stream(self, requests: Sequence[Request]) -> Iterator[Piece]:
        """Continue prompts; one that finishes makes room for the next in the queue.

        What is drawn for a request depends on nothing but the request. Pages for its
        longest continuation are taken as it starts.

        Raises:
          UserError: an unfit request; nothing has begun then.
        """
        for index, request in enumerate(requests):
            try:
                self.check_request(request)
            except UserError as error:
                raise UserError(f"request {index}: {error}") from error
        queue = list(enumerate(requests))[::-1]
        jobs: list[Job] = []
        try:
            while queue or jobs:
                self._admit(queue, jobs)
                for job, piece in self.advance(jobs):
                    piece = _with_routes(piece, job.sequence)
                    if piece.finished:
                        jobs.remove(job)
                        self.close(job.sequence)
                    yield piece
        finally:  # also if the caller takes no more
            for job in jobs:
                self.close(job.sequence)

    def check_request(self, request: Request) -> None:
        """Raises UserError unless the prompt can be continued as asked."""
        self.check(request.prompt)
        self._check_ask(len(request.prompt), request.ask)
        self.check_features(request.prompt, request.features_MD)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """`stream`, collected."""
        made = [Completion([], [], "", None) for _ in requests]
        for piece in self.stream(requests):
            done = made[piece.number]
            done.tokens.extend(piece.tokens)
            done.logprobs.extend(piece.logprobs)
            made[piece.number] = done._replace(
                finished=piece.finished or "", routes=piece.routes
            )
        return made

    def _admit(self, queue: list[tuple[int, Request]], jobs: list[Job]) -> None:
        """Start requests, first come first served, while slots and pages are left."""
        while queue and (self.free_slots() or not jobs):
            index, request = queue[-1]
            room = request.ask.max_tokens
            total = len(request.prompt) + room
            if jobs and not any(self.pager.room(s, total) for s in self.free_slots()):
                return  # pages come back when a job finishes
            sequence = self.open(
                request.prompt, room=room, features_MD=request.features_MD
            )
            jobs.append(self.start(sequence, request.ask, number=index))
            queue.pop()

    def advance(self, jobs: Sequence[Job]) -> list[tuple[Job, Piece]]:
        """Read a chunk of those that have many tokens pending; decode the others.

        The pieces have no routes; those of a sequence are in `Live.routes`.
        """
        long = [job.sequence for job in jobs if self.is_long(job.sequence)]
        if long:
            self.read_chunk(long)
        ready = [job for job in jobs if not self.is_long(job.sequence)]
        return self.decode(ready) if ready else []

    def is_long(self, sequence: Live) -> bool:
        """Whether more is pending than a call of `decode` takes."""
        return sequence.waiting > self._steps or sequence.unseen > 0

    def decode(self, jobs: Sequence[Job]) -> list[tuple[Job, Piece]]:
        """One call for jobs of which none is long."""
        with self.on_mesh():
            self.cache, drawn = program.decode(
                self.model,
                self.variables,
                self.current_cache(),
                self._ask(jobs),
                self._allowed,
                routes=self.routes,
            )
        drawn = [None if x is None else np.asarray(x) for x in drawn]
        return [(job, self._collect(job, *drawn)) for job in jobs]

    def _ask(self, jobs: Sequence[Job]) -> program.Ask:
        B = self.slots
        forced_BK = np.zeros((B, self._steps), np.int32)
        forced_B, wanted_B = np.zeros((2, B), np.int32)
        recent_BL = np.full((B, MAX_STOP_TOKENS), -1, np.int32)
        asks: list[Ask | None] = [None] * B
        for job in jobs:
            slot, pending = job.sequence.slot, job.sequence.pending(self._steps)
            forced_BK[slot, : len(pending)] = pending
            forced_B[slot] = len(pending)
            wanted_B[slot] = job.ask.max_tokens - len(job.drawn)
            recent = job.drawn[-MAX_STOP_TOKENS:]
            recent_BL[slot, MAX_STOP_TOKENS - len(recent) :] = recent
            asks[slot] = job.ask
        knobs = make_knobs([(ask.sampling, ask.seed) if ask else None for ask in asks])
        return program.Ask(
            forced_BK, forced_B, wanted_B, stop_arrays(asks), recent_BL, knobs
        )

    def _collect(
        self,
        job: Job,
        token_KB: np.ndarray,
        logprob_KB: np.ndarray,
        length_B: np.ndarray,
        routes_KBLA: np.ndarray | None,
    ) -> Piece:
        """Take what a call of `decode` did for one job."""
        sequence, slot = job.sequence, job.sequence.slot
        at = np.flatnonzero(token_KB[:, slot] >= 0)
        tokens = token_KB[at, slot].tolist()
        count = int(length_B[slot]) - sequence.read
        sequence.tokens += tokens
        sequence.read += count
        job.drawn += tokens
        if routes_KBLA is not None:
            sequence.routes.append(routes_KBLA[:count, slot])
        finished = None
        if ends(job.drawn, job.ask):
            finished = "stop"
        elif len(job.drawn) == job.ask.max_tokens:
            finished = "length"
        logprobs = logprob_KB[at, slot].tolist()
        return Piece(job.number, tokens, logprobs, finished, None)

    def _check_ask(self, length: int, ask: Ask) -> None:
        """Raises UserError unless so many tokens can be continued as asked."""
        self.check_length(length, ask.max_tokens)
        for stop in ask.stop:
            try:
                self.check(stop)
            except UserError as error:
                raise UserError(f"stop sequence {stop}: {error}") from error


def _with_routes(piece: Piece, sequence: Live) -> Piece:
    """The piece; the last of a job with the routes of its sequence, if recorded."""
    if not piece.finished or not sequence.routes:
        return piece
    return piece._replace(routes=np.concatenate(sequence.routes))
