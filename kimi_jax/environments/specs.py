"""Environments by name: "tools:difficulty=1/2/3:length=1K".

Specs are written as those of tasks (`kimi_jax.tasks.specs`): a name and dials, lists
with slashes. All environments have the dials difficulty (1), length (1K) and reward (a
function by its dotted name); the rest are parameters of their classes, which must have
defaults. "package.module:Class" names a class of one's own, made as Class(format).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kimi_jax.environments.code import Code
from kimi_jax.environments.dialogue import Dialogue
from kimi_jax.environments.documents import Documents
from kimi_jax.environments.environment import Environment, Task
from kimi_jax.environments.format import Format
from kimi_jax.environments.rewards import Rewarded
from kimi_jax.environments.tools import Tools
from kimi_jax.errors import UserError
from kimi_jax.tasks import specs
from kimi_jax.tasks.specs import Spec

ENVIRONMENTS: Mapping[str, type] = {
    "tools": Tools,
    "documents": Documents,
    "code": Code,
}
_COMMON: Mapping[str, type] = {"difficulty": int, "length": int, "reward": str}
_DEFAULTS = {"difficulty": 1, "length": 1024}


def parse(text: str, extra: Mapping[str, type] | None = None) -> list[Spec]:
    """The specs that `text` stands for: more than one where values are lists.

    Args:
      extra: dials besides those of the environment, and their types.

    Raises:
      UserError: an unknown name or dial, with the nearest one; a value of a wrong
        kind; or a class that cannot be imported.
    """
    name, items = _split(text)
    kind = _class(name)
    known = {**_COMMON, **dials(kind), **(extra or {})}
    return specs.spread(text, name, items, known, what="environment")


def parse_list(texts: Sequence[str]) -> list[Spec]:
    """The specs of all `texts`, each once; see `parse`."""
    found = [spec for text in texts for spec in parse(text)]
    specs.refuse_twice(found, "environment")
    return found


def dials(kind: type) -> dict[str, type]:
    """The parameters of an environment's class after the format, with their types.

    Raises:
      UserError: one has no default, which would say what it is.
    """
    _, *parameters = inspect.signature(kind).parameters.values()
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty:
            raise UserError(
                f"environment {kind.__name__}: {parameter.name} has no default; give "
                "it one, a number or text"
            )
    return {x.name: type(x.default) for x in parameters}


def task_of(spec: Spec, seed: int) -> Task:
    """The task of a spec and a seed."""
    own = {k: v for k, v in spec.dials.items() if k not in _DEFAULTS}
    difficulty, length = (spec.dials.get(k, v) for k, v in _DEFAULTS.items())
    return Task(str(Spec(spec.name, own)), difficulty, length, seed)


def make(spec: Spec, form: Format) -> Environment:
    """The environment of a spec.

    Raises:
      UserError: its dials do not go together, or there is no such reward.
    """
    environment = build(spec, form)
    inner = environment.environment if isinstance(environment, Rewarded) else None
    family = inner or environment
    if isinstance(family, Dialogue):
        task = task_of(spec, 0)
        family.check(task.difficulty, task.length)
    return environment


def make_of(task: Task, form: Format) -> Environment:
    """The environment of a task, which `task_of` made of a spec that `make` took."""
    (spec,) = parse(task.environment)
    return build(spec, form)


def build(spec: Spec, form: Format) -> Environment:
    """The environment of a spec that `make` took before: it is not checked again."""
    own = {k: v for k, v in spec.dials.items() if k not in _COMMON}
    environment = cast(Environment, _class(spec.name)(form, **own))
    if reward := spec.dials.get("reward"):
        module, _, function = reward.rpartition(".")
        return Rewarded(environment, _imported(f"reward={reward}", module, function))
    return environment


def _split(text: str) -> tuple[str, list[str]]:
    name, *items = text.strip().split(":")
    if name not in ENVIRONMENTS and items and "=" not in items[0]:
        name = f"{name}:{items.pop(0)}"
    return name, items


def _class(name: str) -> type:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module, colon, called = name.partition(":")
    if not colon:
        hint = specs.nearest(name, [*ENVIRONMENTS])
        raise UserError(
            f"environment {name!r} does not exist; {hint}, or name a class of your "
            "own as package.module:Class"
        )
    return _imported(f"environment {name!r}", module, called)


def _imported(where: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where}: cannot be imported ({error}); it must be in a module that "
            "Python finds from here"
        ) from error
