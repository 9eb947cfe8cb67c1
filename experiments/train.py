"""Train a model: python -m experiments.train --config=configs/X.py --workdir=DIR

Resumes if the workdir holds the same run. Ctrl-C saves first.
"""

import shlex
import sys

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax import distributed, gpus
from kimi_jax.train.loop import train


def main(overrides: list[str]) -> None:
    command = shlex.join(["python", "-m", "experiments.train", *sys.argv[1:]])
    config = cli.load_config(overrides)
    gpus.check()
    distributed.start(config.cluster)
    train(
        config,
        flags.FLAGS.workdir,
        console=Console(),
        command=command,
    )


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True)
