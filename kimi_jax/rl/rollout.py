"""Trajectories: the policy and the environments take turns, many at a time.

A task's prompt is opened and read once. Its sequence is forked for the members of the
group as slots come free, and becomes the last member itself. The policy writes a turn,
the environment's answer is appended, and so on; nothing is read twice. A trajectory
that ends makes room for the next, and one that has not ended when a run does stays in
its slot. docs/rollouts.md tells the whole life.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax.environments.environment import Environment, Step, Task
from kimi_jax.environments.episodes import guard
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.pages import CacheFull
from kimi_jax.infer.requests import Ask, Piece
from kimi_jax.infer.sampling import Sampling
from kimi_jax.infer.slots import Live
from kimi_jax.rl import rollout_state
from kimi_jax.rl.members import Group, Limits, Member, Statistics
from kimi_jax.rl.trajectory import Finished, Trajectory, Turn, plain


class Rollouts:
    """Plays tasks with a generator, whose slots are its own.

    What is drawn for a trajectory depends on the weights and on (seed, group, member,
    position) alone: not on the other trajectories, the slots, or the runs it took.

    Args:
      generator: its `variables` may be replaced between runs. Sequences that live on
        keep the states that older weights have made.
      make_environment: one for each trajectory. It is guarded here: a fault ends the
        trajectory with "error" and no reward.
      sampling, stop: of every turn; `stop` ends a turn, such as ((end,),).
      clock: seconds; for tests.

    Attributes:
      statistics: of the last run.

    Raises:
      UserError: limits that the generator has no room for, or unknown stop tokens.
    """

    def __init__(
        self,
        generator: Generator,
        make_environment: Callable[[Task], Environment],
        limits: Limits,
        sampling: Sampling,
        stop: tuple[tuple[int, ...], ...],
        seed: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        if limits.max_tokens > generator.length:
            raise UserError(
                f"max_tokens={limits.max_tokens}, but the generator has "
                f"length={generator.length}; lower the one or raise the other"
            )
        for tokens in stop:
            generator.check(tokens)
        self.generator, self.limits, self.seed = generator, limits, seed
        self.statistics = Statistics()
        self._make_environment = make_environment
        self._sampling, self._stop, self._clock = sampling, stop, clock
        self._next_group = 0
        self._queue: list[Group] = []  # nothing of them has begun
        self._groups: list[Group] = []  # some of their members have not begun
        self._members: list[Member] = []
        self._ended: list[Trajectory] = []  # not handed out yet

    @property
    def unfinished(self) -> list[Trajectory]:
        """Copies of the trajectories in slots, their open turns included."""
        return [member.so_far() for member in self._members]

    @property
    def waiting(self) -> int:
        """Members that have not begun."""
        return sum(g.size - g.begun for g in [*self._groups, *self._queue])

    def run(
        self,
        new: Sequence[Task],
        *,
        group_size: int,
        version: int,
        max_calls: int | None = None,
    ) -> list[Trajectory]:
        """Go on with what is unfinished, then play each new task `group_size` times.

        Args:
          version: of the policy, which is recorded with each token.
          max_calls: instead of that of the limits.

        Returns:
          What has finished, in the order in which it did; the rest goes on in the next
          run. The members of a group may come in different runs.

        Raises:
          UserError: `group_size` has no room.
          CacheFull: the pool is too small for one trajectory of max_tokens.
        """
        self._check_group_size(group_size)
        for task in new:
            self._queue.append(Group(self._next_group, task, group_size))
            self._next_group += 1
        most = self.limits.max_calls if max_calls is None else max_calls
        self.statistics = Statistics()
        now = self._clock()
        while self._members or self._groups or self._queue:
            if most is not None and self.statistics.calls >= most:
                break
            begun, advanced = self._begin(), self._advance(version)
            if not begun and not advanced:
                raise CacheFull(
                    "the cache has no room for a trajectory of "
                    f"max_tokens={self.limits.max_tokens}; raise `num_pages` of the "
                    "generator, or lower max_tokens"
                )
            before, now = now, self._clock()
            self._take_time(now - before)
        ended, self._ended = self._ended, []
        self.statistics.close([t.finished for t in ended], self.waiting)
        return ended

    def state(self) -> dict[str, Any]:
        """All of it between two runs, as plain values and numpy arrays."""
        return rollout_state.pack(
            self.generator,
            {
                "seed": self.seed,
                "next_group": self._next_group,
                "ended": [trajectory.to_json() for trajectory in self._ended],
            },
            self._queue,
            self._groups,
            self._members,
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, exactly, with a generator of the same sizes.

        The turns are replayed through fresh environments. One that answers otherwise
        than it did ends its trajectory with "error" in the next run.

        Raises:
          UserError: rollouts that have begun, or a state that does not fit.
        """
        if self._members or self._groups or self._queue:
            raise UserError("these rollouts have begun; restore into new ones")
        if state["seed"] != self.seed:
            raise UserError(
                f"seed={self.seed}, but the rollouts were saved with "
                f"seed={state['seed']}; go on with that"
            )
        kept = rollout_state.unpack(self.generator, state, self.limits.max_tokens)
        self._next_group, self._ended = state["next_group"], kept.ended
        self._queue, self._groups = kept.queue, kept.groups
        for group in self._groups:
            if group.begun == 0:
                group.first, *_ = self._reset(group.task)
        for part in kept.members:
            self._resume(part)

    def _begin(self) -> bool:
        """Start groups and members while there is room; whether anything happened."""
        before = self._begun()
        for group in list(self._groups):
            self._place(group)
        while self._queue and all(g.root for g in self._groups) and self._part():
            group = self._queue.pop(0)
            if self._open(group):
                self._groups.append(group)
                self._place(group)
        return self._begun() != before

    def _begun(self) -> tuple[int, ...]:
        roots = sum(group.root is not None for group in self._groups)
        return self.waiting, roots, len(self._groups), len(self._ended)

    def _open(self, group: Group) -> bool:
        """Learn the prompt; False: there is none that fits, and all members end."""
        group.first, group.prompt, error = self._reset(group.task)
        reason: Finished = "error" if error else "tokens"
        if not error and len(group.prompt) < self.limits.max_tokens:
            return True
        for number in range(group.size):
            self._drop(group, number, reason, error)
        return False

    def _place(self, group: Group) -> None:
        """Give the prompt a slot, then start members while there is room."""
        generator, most = self.generator, self.limits.max_tokens
        if group.root is None:
            slots = self._part()
            if not slots or not generator.pager.room(slots[0], len(group.prompt)):
                return
            with self._timed("read_seconds"):
                group.root = generator.open(group.prompt, slot=slots[0])
            self.statistics.given += len(group.prompt)
        while group.begun < group.size - 1:
            if not self._can_fork(group.root):
                return
            with self._timed("read_seconds"):
                (sequence,) = generator.fork(group.root, 1)
            self._start(group, sequence)
        if generator.pager.room(group.root.slot, most):
            self._groups.remove(group)
            self._start(group, group.root)

    def _part(self) -> list[int]:
        """The free slots of a part of the rows in which no prompt lies; the most."""
        pager = self.generator.pager
        parts: dict[int, list[int]] = {}
        for slot in self.generator.free_slots():
            parts.setdefault(pager.shard(slot), []).append(slot)
        for group in self._groups:
            if group.root is not None:
                parts.pop(pager.shard(group.root.slot), None)
        return max(parts.values(), key=len, default=[])

    def _can_fork(self, root: Live) -> bool:
        """Whether the prompt is read, with a slot and pages for one more member."""
        generator = self.generator
        pager, most = generator.pager, self.limits.max_tokens
        part = pager.shard(root.slot)
        free = [s for s in generator.free_slots() if pager.shard(s) == part]
        read = root.waiting == 1
        return read and bool(free) and pager.room(free[0], most, shared=root.read)

    def _start(self, group: Group, sequence: Live) -> None:
        """The next member, in a slot of its own with pages for all its tokens."""
        self.generator.reserve(sequence, self.limits.max_tokens)
        number, error = group.begun, ""
        environment, group.first = group.first, None
        if number:
            environment, prompt, error = self._reset(group.task)
            if not error and prompt != group.prompt:
                error = "the prompt is not the same each time"
        if environment is None or error:
            self.generator.close(sequence)
            self._drop(group, number, "error", error)
            return
        group.begun += 1
        trajectory = Trajectory(group.task, group.number, number, list(group.prompt))
        self._members.append(self._member(trajectory, environment, sequence))

    def _drop(self, group: Group, number: int, reason: Finished, error: str) -> None:
        """A member that ends before it has begun."""
        group.begun += 1
        trajectory = Trajectory(group.task, group.number, number, list(group.prompt))
        trajectory.finished = reason
        if error:
            end = len(group.prompt)
            trajectory.turns = [Turn(end, end, 0.0, {"error": error, "success": False})]
        self._ended.append(trajectory)

    def _member(
        self,
        trajectory: Trajectory,
        environment: Environment,
        sequence: Live,
        *,
        drawn: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> Member:
        """At the beginning of a turn, or after what is drawn of it."""
        start = len(sequence.tokens) - len(drawn)
        room = min(self.limits.turn_tokens, self.limits.max_tokens - start)
        entropy = (self.seed, trajectory.group, trajectory.member)
        (seed,) = np.random.SeedSequence(entropy).generate_state(1)
        ask = Ask(room, self._sampling, self._stop, int(seed))
        job = self.generator.start(sequence, ask, drawn=drawn)
        return Member(trajectory, environment, sequence, job, start, seconds)

    def _advance(self, version: int) -> bool:
        """Read a chunk of each part of the rows; decode. Whether there was any."""
        generator, stats = self.generator, self.statistics
        long = [m.sequence for m in self._members if generator.is_long(m.sequence)]
        long += [g.root for g in self._groups if g.root and g.root.waiting > 1]
        if long:
            with self._timed("read_seconds"):
                generator.read_chunk(long)
                jax.block_until_ready(generator.cache)
        ready = [m for m in self._members if not generator.is_long(m.sequence)]
        if ready:
            with self._timed("decode_seconds"):
                pieces = generator.decode([member.job for member in ready])
            stats.count_call(len(ready))
            for member, (_, piece) in zip(ready, pieces, strict=True):
                self._collect(member, piece, version)
        return bool(long or ready)

    def _collect(self, member: Member, piece: Piece, version: int) -> None:
        trajectory = member.trajectory
        trajectory.logprobs += piece.logprobs
        trajectory.versions += [version] * len(piece.tokens)
        self.statistics.drawn += len(piece.tokens)
        if not piece.finished:
            return
        cut = piece.finished == "length"
        if cut and len(member.sequence.tokens) == self.limits.max_tokens:
            self._close_turn(member, 0.0, {"cut": True})
            self._finish(member, "tokens")
            return
        with self._timed("environment_seconds"):
            step = member.environment.step(member.sequence.tokens[member.start :])
        info = plain(step.info) | ({"cut": True} if cut else {})
        self._close_turn(member, float(step.reward), info)
        if reason := self._reason(member, step):
            self._finish(member, reason)
            return
        self.generator.append(member.sequence, step.tokens)
        self.statistics.given += len(step.tokens)
        self._members[self._members.index(member)] = self._member(
            trajectory, member.environment, member.sequence, seconds=member.seconds
        )

    def _reason(self, member: Member, step: Step) -> Finished:
        """Why the trajectory ends after this step; "": it goes on."""
        if "error" in step.info:
            return "error"
        if step.done:
            return "done"
        if len(member.trajectory.turns) >= self.limits.max_turns:
            return "turns"
        tokens = len(member.sequence.tokens) + len(step.tokens)
        return "tokens" if tokens >= self.limits.max_tokens else ""

    def _close_turn(self, member: Member, reward: float, info: dict[str, Any]) -> None:
        stop = len(member.sequence.tokens)
        member.trajectory.turns.append(Turn(member.start, stop, reward, info))

    def _finish(self, member: Member, reason: Finished) -> None:
        self._members.remove(member)
        self._hand_out(member.trajectory, member.sequence, reason)

    def _hand_out(
        self, trajectory: Trajectory, sequence: Live, reason: Finished
    ) -> None:
        """The trajectory has ended: free its slot."""
        # Tokens of the environment that were not read yet lead to nothing.
        trajectory.tokens = sequence.tokens[: sequence.read + 1]
        if sequence.routes:
            trajectory.routes = np.concatenate(sequence.routes)
        trajectory.finished = reason
        self.generator.close(sequence)
        self._ended.append(trajectory)

    def _take_time(self, seconds: float) -> None:
        """Count the time; end what has taken too much."""
        for member in list(self._members):
            member.seconds += seconds
            if self.limits.seconds is None or member.seconds <= self.limits.seconds:
                continue
            if member.job.drawn:
                self._close_turn(member, 0.0, {"cut": True})
            self._finish(member, "time")

    def _reset(self, task: Task) -> tuple[Environment | None, list[int], str]:
        """(an environment at its start, its prompt, "") or what went wrong."""
        with self._timed("environment_seconds"):
            try:
                made = self._make_environment(task)
            except Exception as error:
                return None, [], f"{type(error).__name__}: {error}"
            environment = guard(made, vocab_size=self.generator.model.vocab_size)
            return environment, environment.reset(task), ""

    def _resume(self, part: rollout_state.Part) -> None:
        """A member from its saved trajectory and its sequence in a slot."""
        trajectory, sequence = part.trajectory, part.sequence
        start = part.start
        environment, error = self._replay(trajectory, start)
        if environment is not None:
            drawn, seconds = sequence.tokens[start:], part.seconds
            self._members.append(
                self._member(
                    trajectory, environment, sequence, drawn=drawn, seconds=seconds
                )
            )
            return
        info = {"error": error, "success": False}
        stop = sequence.read + 1  # all that was drawn lies before
        trajectory.turns.append(Turn(min(start, stop), stop, 0.0, info))
        self._hand_out(trajectory, sequence, "error")

    def _replay(
        self, trajectory: Trajectory, end: int
    ) -> tuple[Environment | None, str]:
        """A fresh environment after the turns, which lead to the first `end` tokens."""
        environment, said, error = self._reset(trajectory.task)
        if environment is None:
            return None, error
        tokens, at = trajectory.tokens, 0
        for turn in trajectory.turns:
            if said != tokens[at : turn.start]:
                break
            with self._timed("environment_seconds"):
                said = list(environment.step(tokens[turn.start : turn.stop]).tokens)
            at = turn.stop
        if said != tokens[at:end]:
            return None, "its answers are not the same each time"
        return environment, ""

    def _check_group_size(self, group_size: int) -> None:
        if group_size < 1:
            raise UserError(f"group_size={group_size}: must be at least 1")
        pager, slots = self.generator.pager, self.generator.slots
        each = slots // (pager.shard(slots - 1) + 1)
        if group_size > 1 and each < 2:
            raise UserError(
                f"group_size={group_size} with {each} slot in each part of the rows: a "
                "prompt and one member have to lie together; raise `slots`"
            )

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = self._clock()
        yield
        spent = getattr(self.statistics, name) + self._clock() - started
        setattr(self.statistics, name, spent)
