"""A run in stages: python -m experiments.curriculum --config=... --workdir=DIR

The file lists its stages in get_stages() (kimi_jax/curriculum/stages.py says what they
may hold). The same command resumes the run, in the middle of a stage or between two.
--list prints the stages, and what experiments.aot takes to plan each of them.
"""

import shlex
import sys

from absl import flags
from rich.console import Console
from rich.text import Text

from experiments import cli
from kimi_jax import distributed, flops
from kimi_jax.curriculum import driver
from kimi_jax.curriculum.stages import Stage, make_stages
from kimi_jax.monitor.console import print_first_screen


def main(overrides: list[str]) -> None:
    file = cli.load_file()
    stages = make_stages(file.call("get_stages"), file.call("get_config"), overrides)
    console = Console()
    if flags.FLAGS.list:
        _list(console, stages, overrides)
        return
    distributed.start(stages[0].config.cluster)
    command = shlex.join(["python", "-m", "experiments.curriculum", *sys.argv[1:]])
    driver.run(stages, flags.FLAGS.workdir, console=console, command=command)


def _list(console: Console, stages: list[Stage], common: list[str]) -> None:
    head = ("stage", "rows", "steps", "tokens a round", "rounds", "FLOPs", "mesh")
    rows: list[tuple[str | int, ...]] = [head]
    for stage in stages:
        train, mesh = stage.config.train, stage.config.mesh
        axes = [f"{k}={v}" for k, v in vars(mesh).items() if v != 1]
        spent = train.steps * flops.step_flops(stage.config)
        rows.append(
            (
                stage.name,
                train.batch_size,
                train.steps,
                stage.round_tokens,
                stage.rounds,
                f"{spent:.2e}",
                " x ".join(axes) or "one device",
            )
        )
    print_first_screen(console, [("stages", rows)])
    for stage in stages:
        until = ", ".join(f"{k} <= {v:g}" for k, v in stage.until.items())
        said = [f"--config.{line}" for line in (*common, *stage.overrides)]
        words = shlex.join([f"--config={flags.FLAGS.config}", *said])
        console.print(
            Text(f"{stage.name}: until {until or 'its tokens are used'}\n  {words}"),
            soft_wrap=True,
        )


if __name__ == "__main__":
    flags.DEFINE_bool("list", False, "print the stages and run nothing")
    cli.run(main, config=True, workdir=True)
