"""What is measured, one cell a result, all checked before anything runs.

A cell is a spec with one value for each dial (`tasks.specs`). Besides the tasks:

    text:multiple=2:source=0    bits per byte of a source's held-out text, in windows
                                of so many training lengths, and loss by position
    speed:length=4K             tokens a second of prefill and decoding, bytes of cache
    episodes:tools:length=1K    success in an environment (docs/environments.md), on
                                tasks that training never draws; with temperature=0.7
                                not the likeliest tokens but drawn ones
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from kimi_jax.config import Config
from kimi_jax.data.generated import is_generated
from kimi_jax.data.haystacks import load_haystack
from kimi_jax.data.store import check_vocabulary
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.environments import specs as environment_specs
from kimi_jax.environments.format import make_format
from kimi_jax.errors import UserError
from kimi_jax.tasks import specs
from kimi_jax.tasks.example import Task
from kimi_jax.tasks.specs import Spec
from kimi_jax.tasks.text import Text

TEXT, SPEED, EPISODES = "text", "speed", "episodes:"
_MULTIPLES = (1, 2, 4, 16)
DIALS = {
    TEXT: {"multiple": int, "source": int},
    SPEED: {"length": int, "rows": int, "new_tokens": int},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One result; `task` is the generator and `world` the environment, if any."""

    spec: Spec
    length: int  # tokens of a row
    rows: int  # how many are read, roughly: for the estimate of time
    task: Task | None = None
    world: Spec | None = None

    @property
    def name(self) -> str:
        return str(self.spec)

    @property
    def dials(self) -> dict[str, Any]:
        """All of them, those that were not given included."""
        if self.task is None:
            return dict(self.spec.dials)
        values = {
            field.name: getattr(self.task, field.name)
            for field in dataclasses.fields(self.task)  # type: ignore[arg-type]
        }
        return {name: value for name, value in values.items() if name != "text"}

    @property
    def file(self) -> str:
        """Of the result: readable, and different for different cells."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        name = self.spec.name.replace(":", "_")
        return f"{name}_{self.length}_{digest}.json"


def make_text(cfg: Config) -> Text:
    """Tokenizer and haystack of a config, the vocabulary checked."""
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    check_vocabulary(tokenizer, cfg.model.vocab_size)
    return Text(tokenizer, load_haystack(cfg.data.haystack))


def plan(cfg: Config, tasks: str, text: Text) -> list[Cell]:
    """The cells of a list of specs.

    Raises:
      UserError: every cell that cannot be measured, with the fix.
    """
    known = specs.task_dials() | DIALS
    cells: list[Cell] = []
    problems: list[str] = []
    for item in tasks.split(","):
        try:
            if item.strip().startswith(EPISODES):
                cells += _episode_cells(cfg, item.strip(), text)
                continue
            found = specs.parse(item, known)
        except UserError as error:
            problems.append(str(error))
            continue
        for spec in found:
            try:
                cells += _MAKERS.get(spec.name, _task_cells)(cfg, spec, text)
            except UserError as error:
                problems.append(str(error))
    names = [cell.name for cell in cells]
    problems += [
        f"task {name!r} is named twice; name it once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    problems += [p for cell in cells if (p := _too_long(cfg, cell))]
    if problems:
        raise UserError("\n  - ".join(["these tasks cannot run:", *problems]))
    return cells


def _task_cells(cfg: Config, spec: Spec, text: Text) -> Sequence[Cell]:
    task = specs.make(spec, text)
    return [Cell(spec, task.length, cfg.evaluation.examples, task)]


def _text_cells(cfg: Config, spec: Spec, text: Text) -> Sequence[Cell]:
    sources = cfg.data.sources
    if any(map(is_generated, sources)):
        raise UserError(
            f"task {spec}: config.data.sources={sources} are generated tasks or "
            "episodes; name other tasks, or set --config.data.sources to text"
        )
    source, multiple = spec.dials.get("source"), spec.dials.get("multiple")
    if source is not None and not 0 <= source < len(sources):
        raise UserError(
            f"task {spec}: config.data.sources has {len(sources)}, counted from 0"
        )
    if multiple is not None and multiple < 1:
        raise UserError(f"task {spec}: multiple={multiple} must be at least 1")
    return [
        Cell(
            Spec(TEXT, {"multiple": m, "source": s}),
            m * cfg.train.seq_len,
            max(1, cfg.train.eval_batches * cfg.train.batch_size // m),
        )
        for s in (range(len(sources)) if source is None else [source])
        for m in (_MULTIPLES if multiple is None else [multiple])
    ]


def _speed_cells(cfg: Config, spec: Spec, text: Text) -> Sequence[Cell]:
    dials = {"length": 1024, "rows": 1, "new_tokens": 32, **spec.dials}
    for name, value in dials.items():
        if value < 1:
            raise UserError(f"task {spec}: {name}={value} must be at least 1")
    return [Cell(Spec(SPEED, dials), dials["length"], dials["rows"])]


def _episode_cells(cfg: Config, item: str, text: Text) -> list[Cell]:
    if cfg.rl is None:
        raise UserError(
            f"task {item}: config.rl is none, and says how long turns and trajectories "
            "may be; use the config that the policy was trained with"
        )
    form = make_format(text.tokenizer)
    own = {"temperature": float}
    cells = []
    for spec in environment_specs.parse(item.removeprefix(EPISODES), own):
        dials = dict(spec.dials)
        temperature = dials.pop("temperature", 0.0)
        world = Spec(spec.name, dials)
        environment_specs.make(world, form)
        if temperature < 0.0:
            raise UserError(f"task {item}: temperature={temperature} must be 0 or more")
        task = environment_specs.task_of(world, 0)
        named = {"difficulty": task.difficulty, "length": task.length}
        every = {**named, "temperature": temperature, **dials}
        name = Spec(EPISODES + spec.name, every)
        cells.append(Cell(name, task.length, cfg.evaluation.examples, world=world))
    return cells


_MAKERS: dict[str, Callable[[Config, Spec, Text], Sequence[Cell]]] = {
    TEXT: _text_cells,
    SPEED: _speed_cells,
}


def _too_long(cfg: Config, cell: Cell) -> str | None:
    most = cfg.evaluation.max_length
    if cell.length <= most:
        return None
    return (
        f"task {cell.name}: {cell.length:,} tokens are more than the model is given, "
        f"config.evaluation.max_length={most:,}; shorten the task, or raise it to "
        f"--config.evaluation.max_length={cell.length} if the memory holds it"
    )
