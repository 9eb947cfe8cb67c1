r"""Learn by acting: python -m experiments.rl --config=configs/X.py --workdir=DIR

    --config=configs/rl_tools.py --config.train.init_from=runs/warm --workdir=runs/rl

The policy acts in the environments of config.rl and learns from the rewards. Resumes if
the workdir holds the same run; Ctrl-C saves first. docs/rl.md goes the whole way.
"""

import shlex
import sys

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax import distributed
from kimi_jax.rl.loop import reinforce


def main(overrides: list[str]) -> None:
    command = shlex.join(["python", "-m", "experiments.rl", *sys.argv[1:]])
    config = cli.load_config(overrides)
    distributed.start(config.cluster)
    reinforce(config, flags.FLAGS.workdir, console=Console(), command=command)


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True)
