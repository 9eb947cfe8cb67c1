"""Look before running: python -m experiments.doctor [--config=...] [--workdir=...]

The machine: versions, limits, disk, devices, a round trip over all of them, kernels.
With --config first the experiment: the parameters and the FLOPs by part, how the layers
fold into scans, and how the optimizer updates each parameter; nothing of it is
allocated, so it answers for K3 on a laptop. Exits with 1 if a run would fail.
"""

import os
import pathlib
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax import accounting, canonical, distributed, layout
from kimi_jax.config import Config, Model
from kimi_jax.modules import transformer
from kimi_jax.monitor import machine
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.train import optimizer
from kimi_jax.train.first_screen import flops_rows, layer_row, parameter_rows


def main(overrides: list[str]) -> int:
    config, console = cli.load_config(overrides), Console()
    place = distributed.start(config.cluster)
    # Of several processes one prints the tables, and each its problems.
    tables = Console(quiet=place is not None and place.process > 0)
    if flags.FLAGS.config:
        _print_experiment(tables, config)
    found = machine.software()
    _print_findings(tables, "software", found)
    found += (part := machine.limits(pathlib.Path(flags.FLAGS.workdir or ".")))
    _print_findings(tables, "limits", part)
    part, devices = machine.devices(os.environ)
    if devices:
        part.append(machine.round_trip(devices))
        part += machine.kernels(jax.default_backend())
    _print_findings(tables, "devices", part)
    found += part
    who = f"process {place.process}: " if place else ""
    for finding in filter(lambda finding: finding.fix, found):
        word = "broken" if finding.broken else "advice"
        text = f"{who}{word}: {finding.name}: {finding.value}: {finding.fix}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(any(finding.broken for finding in found))


def _print_findings(
    console: Console, title: str, found: Sequence[machine.Finding]
) -> None:
    rows = [(finding.name, finding.value) for finding in found]
    print_first_screen(console, [(title, rows)])


def _print_experiment(console: Console, config: Config) -> None:
    model, length = config.model, config.train.seq_len
    print_first_screen(
        console,
        [
            (f"{config.name}: parameters", parameter_rows(model)),
            (f"FLOPs at {length:,} tokens", flops_rows(model, length)),
            (f"{layer_row(model)}; scanned as", scan_rows(model)),
            ("optimizer", optimizer_rows(config)),
        ],
    )
    parts = accounting.parameter_parts(model)
    total = sum(part.total for part in parts)
    active = sum(part.active for part in parts)
    unit, name = (1e9, "B") if total >= 1e9 else (1e6, "M")
    shown = [f"{count / unit:,.2f} {name}" for count in (total, active)]
    console.print(f"{shown[0]} parameters, {shown[1]} active\n")


def optimizer_rows(config: Config) -> list[tuple[str, str, str, str]]:
    """One row for each kind of parameter: Muon or AdamW, its matrices, its decay."""

    def shapes() -> dict[str, jax.Array]:
        params = transformer.init(config.model, jax.random.key(0))["params"]
        return canonical.flatten(config.model, params)

    return optimizer.rule_rows(jax.eval_shape(shapes), config.optimizer)


def scan_rows(model: Model) -> list[tuple[str, str]]:
    """One row a stage: how often it repeats, and what is in it."""
    rows = []
    for s, stage in enumerate(layout.plan(model)):
        blocks = [
            " ".join(f"{run.repeats}x[{' '.join(run.unit)}]" for run in block)
            for block in stage.blocks
        ]
        rows.append((f"{stage.repeats} x stage {s}", " | ".join(blocks)))
    return rows


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True, optional=True)
