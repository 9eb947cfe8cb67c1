"""Look at an experiment before running it: python -m experiments.doctor --config=...

Checks the config, prints the parameters and the FLOPs by part, how the layers fold into
scans, and how the optimizer updates each parameter. Allocates nothing, so it answers
for K3 on a laptop.
"""

import jax
from rich.console import Console

from experiments import cli
from kimi_jax import accounting, canonical, layout
from kimi_jax.config import Config, Model
from kimi_jax.modules import transformer
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.train import optimizer
from kimi_jax.train.first_screen import flops_rows, layer_row, parameter_rows


def main(overrides: list[str]) -> None:
    config = cli.load_config(overrides)
    console, model, length = Console(), config.model, config.train.seq_len
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
    console.print(f"{total / 1e9:,.2f} B parameters, {active / 1e9:,.2f} B active")


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
    cli.run(main, config=True)
