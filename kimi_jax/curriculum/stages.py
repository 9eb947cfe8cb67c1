"""From what `get_stages()` lists to one config a stage, each checked.

A stage is a dict:

    length        tokens of a row
    tokens        to train on, in a round
    batch_tokens  tokens a step; a multiple of length
    long_share    share of rows from documents of at least `length` tokens; may be left
                  out: documents in proportion to their text
    until         criteria for moving on (`criteria.py`), all of which must hold after a
                  round; may be left out: the stage is one round
    rounds        how many rounds there may be to meet them; left out: 1
    a.b           any override that stages may differ in, such as
                  "optimizer.learning_rate", "mesh.context", "train.remat",
                  "data.strata_mixture", "model.mla.rope_base"
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kimi_jax import config_io
from kimi_jax.config import Config
from kimi_jax.curriculum import criteria
from kimi_jax.errors import UserError

_REQUIRED = ("length", "tokens", "batch_tokens")
_OPTIONAL = ("long_share", "until", "rounds")
# Fields that change neither the parameters nor what text there is.
_MAY_DIFFER = (
    "data.packing",
    "data.mixture",
    "data.strata",
    "optimizer.",
    "mesh.",
    "alerts.",
    "train.micro_batches",
    "train.remat",
    "train.loss_chunk",
    "train.z_loss",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_",
    "model.mla.rope_base",
    "model.mla.block_size",
    "model.gqa.rope_base",
    "model.gqa.block_size",
    "model.kda.chunk_size",
    "model.kda.residuals",
    "model.kda.implementation",
    "model.moe.implementation",
    "model.moe.dispatch",
    "model.moe.capacity_factor",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage; `config` is that of a single round."""

    number: int  # from 1
    config: Config
    overrides: tuple[str, ...]  # "a.b=c": how the config differs from the file's
    until: Mapping[str, float]
    rounds: int

    @property
    def name(self) -> str:
        """Of its folder: "stage_02_65536"."""
        return f"stage_{self.number:02}_{self.config.train.seq_len}"

    @property
    def round_tokens(self) -> int:
        train = self.config.train
        return train.steps * train.batch_size * train.seq_len

    def at(self, rounds: int) -> Config:
        """The config of a stage of so many rounds."""
        steps = rounds * self.config.train.steps
        train = dataclasses.replace(self.config.train, steps=steps)
        return dataclasses.replace(self.config, train=train)


def make_stages(
    listed: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    common: Sequence[str] = (),
) -> list[Stage]:
    """The stages in their order.

    Args:
      listed: what `get_stages` returned.
      values: what `get_config` returned.
      common: overrides "a.b=c" from the command line, for all stages.

    Raises:
      UserError: with a line for each problem of each stage.
    """
    if not isinstance(listed, Sequence) or not listed:
        raise UserError("get_stages() must return a list of at least one stage")
    stages, problems = [], []
    for number, fields in enumerate(listed, 1):
        found = list(_form(fields))
        if not found:
            try:
                stage = _make(number, fields, values, common)
            except config_io.ConfigError as error:
                found = list(error.problems)
            else:
                stages.append(stage)
                found = list(_rules(stage, common))
        problems += [f"stage {number}: {line}" for line in found]
    if problems:
        head = "the curriculum does not hold together; nothing has run:"
        raise UserError("\n  - ".join([head, *problems]))
    return stages


def _make(
    number: int,
    fields: Mapping[str, Any],
    values: Mapping[str, Any],
    common: Sequence[str],
) -> Stage:
    length, batch = fields["length"], fields["batch_tokens"]
    overrides = {
        "train.seq_len": length,
        "train.batch_size": batch // length,
        "train.steps": max(1, round(fields["tokens"] / batch)),
    }
    if fields.get("long_share") is not None:
        share = float(fields["long_share"])
        overrides["data.strata"] = (length,)
        overrides["data.strata_mixture"] = ((0.0, round(1.0 - share, 9), share),)
    overrides |= {k: v for k, v in fields.items() if "." in k}
    lines = tuple(f"{k}={config_io.to_text(v)}" for k, v in overrides.items())
    config = config_io.from_dict(values, [*common, *lines])
    until = {k: float(v) for k, v in fields.get("until", {}).items()}
    return Stage(number, config, lines, until, fields.get("rounds", 1))


def _form(fields: Any) -> Iterator[str]:
    """What is wrong with the dict itself."""
    if not isinstance(fields, Mapping):
        yield f"{fields!r} is not a dict; see kimi_jax/curriculum/stages.py"
        return
    known = (*_REQUIRED, *_OPTIONAL)
    for name in fields:
        if "." not in name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name!r} is not one of {list(known)}" + (
                f"; did you mean {near[0]!r}?" if near else ""
            )
        elif "." in name and not name.startswith(_MAY_DIFFER):
            yield (
                f"config.{name}: all stages of a run share it; set it in get_config, "
                f"or use one that may differ: {', '.join(_MAY_DIFFER)}"
            )
    for name in (*_REQUIRED, "rounds"):
        value = fields.get(name, 1 if name == "rounds" else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name}={value!r}: must be a whole number of at least 1"
            return
    length, batch = fields["length"], fields["batch_tokens"]
    if batch % length:
        near = max(1, round(batch / length)) * length
        yield f"batch_tokens={batch}: not whole rows of {length}; try {near}"
    share = fields.get("long_share")
    if share is not None and not 0.0 <= share <= 1.0:
        yield f"long_share={share!r}: a share between 0 and 1"
    if share is not None and any(name.startswith("data.strata") for name in fields):
        yield "long_share sets config.data.strata and strata_mixture; give one of them"
    yield from criteria.problems(fields.get("until", {}))


def _rules(stage: Stage, common: Sequence[str]) -> Iterator[str]:
    """What must hold between a stage's config, its criteria and the command line."""
    set_here = {line.partition("=")[0] for line in stage.overrides}
    for override in common:
        name = override.partition("=")[0]
        if name in set_here:
            yield f"config.{name}: the stage sets it; take it from the command line"
    config = stage.config
    if stage.rounds > 1 and not stage.until:
        yield f"rounds={stage.rounds}: without `until` nothing asks for another round"
    if stage.rounds > 1 and config.optimizer.final_fraction != 1.0:
        yield (
            f"rounds={stage.rounds}: another round would change the learning rate of "
            "the steps before it; hold it with optimizer.final_fraction=1.0, or use "
            "rounds=1"
        )
    for name in ("mixture", "strata_mixture"):
        if stage.rounds > 1 and len(getattr(config.data, name)) > 1:
            yield (
                f"rounds={stage.rounds}: the rows of config.data.{name} begin at "
                "fractions of a run whose length is open; use one row"
            )
    yield from criteria.misfits(stage.until, config.train)
