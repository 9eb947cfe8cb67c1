r"""A small model with every mechanism of K3 learns Shakespeare on a laptop.

Question: does the whole machine work here, and what does it look like when it does?
Command:  python -m experiments.train --config=configs/quickstart.py \
              --workdir=runs/quickstart
Cost:     under 3 minutes on 2 CPU cores, under 4 GB of memory.
Expect:   2.52 bits per byte on held-out scenes (byte unigrams: 4.86); MaxVio under 0.5.
"""

from configs import common


def get_config():
    config = common.base()
    config.name = "quickstart"
    config.optimizer.learning_rate = 5e-3
    config.train.update(
        steps=150, batch_size=8, log_every=10, eval_every=50, checkpoint_every=50
    )
    return config
