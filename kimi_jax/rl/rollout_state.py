"""Rollouts as plain values and arrays, which `kimi_jax.rl.storage` makes bytes of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kimi_jax.environments.environment import Task
from kimi_jax.errors import UserError
from kimi_jax.infer import snapshots
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.slots import Live
from kimi_jax.rl.members import Group, Member
from kimi_jax.rl.trajectory import Trajectory, from_json


class Part(NamedTuple):
    """A member without its environment."""

    trajectory: Trajectory
    sequence: Live
    start: int
    seconds: float


class Kept(NamedTuple):
    """What `unpack` finds."""

    queue: list[Group]
    groups: list[Group]
    members: list[Part]
    ended: list[Trajectory]


def pack(
    generator: Generator,
    values: Mapping[str, Any],
    queue: Sequence[Group],
    groups: Sequence[Group],
    members: Sequence[Member],
) -> dict[str, Any]:
    """`values`, what is to be done, and the sequences in slots."""
    roots = [group.root for group in groups if group.root is not None]
    live = [*roots, *(member.sequence for member in members)]
    return {
        **values,
        "sizes": _sizes(generator),
        "queue": [_group(group, live) for group in queue],
        "groups": [_group(group, live) for group in groups],
        "members": [
            {
                "trajectory": member.so_far().to_json(),
                "sequence": live.index(member.sequence),
                "seconds": member.seconds,
            }
            for member in members
        ],
        "sequences": snapshots.save_all(generator, live),
    }


def unpack(generator: Generator, state: Mapping[str, Any], max_tokens: int) -> Kept:
    """Undoes `pack`: the sequences are in slots again.

    Raises:
      UserError: the generator has other sizes, or the state is damaged.
    """
    sizes = _sizes(generator)
    if state["sizes"] != sizes:
        raise UserError(
            f"the rollouts were saved with {state['sizes']} and the generator has "
            f"{sizes}; make it with the same"
        )
    longest = max((len(s["tokens"]) for s in state["sequences"]), default=0)
    if longest >= max_tokens:
        raise UserError(
            f"max_tokens={max_tokens}, but a saved trajectory has {longest} tokens "
            "already; raise max_tokens"
        )
    rooms = [0] * len(state["sequences"])
    for member in state["members"]:
        tokens = len(state["sequences"][member["sequence"]]["tokens"])
        rooms[member["sequence"]] = max_tokens - tokens
    live = snapshots.load_all(generator, state["sequences"], rooms)
    return Kept(
        [_ungroup(values, live) for values in state["queue"]],
        [_ungroup(values, live) for values in state["groups"]],
        [_part(values, live) for values in state["members"]],
        [from_json(values) for values in state["ended"]],
    )


def _sizes(generator: Generator) -> dict[str, int]:
    """What has to agree for a sequence to go on exactly, beside the model."""
    pager = generator.pager
    return {
        "slots": generator.slots,
        "parts of the rows": pager.shard(generator.slots - 1) + 1,
        "page_size": pager.page_size,
    }


def _group(group: Group, live: Sequence[Live]) -> dict[str, Any]:
    return {
        "number": group.number,
        "task": list(group.task),
        "size": group.size,
        "begun": group.begun,
        "prompt": group.prompt,
        "root": -1 if group.root is None else live.index(group.root),
    }


def _ungroup(values: Mapping[str, Any], live: Sequence[Live]) -> Group:
    root = None if values["root"] < 0 else live[values["root"]]
    return Group(**{**values, "task": Task(*values["task"]), "root": root})


def _part(values: Mapping[str, Any], live: Sequence[Live]) -> Part:
    trajectory = from_json(values["trajectory"])
    start = trajectory.turns.pop().start
    return Part(trajectory, live[values["sequence"]], start, values["seconds"])
