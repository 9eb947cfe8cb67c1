r"""A small K3 with a vision tower learns to read numbers that are drawn on the spot.

Question: does the image path learn from nothing, jointly with text?
Command:  python -m experiments.train --config=configs/vision_words.py \
              --workdir=runs/vision_words
Cost:     TBD
Expect:   TBD
"""

from configs import common


def get_config():
    config = common.base()
    config.name = "vision_words"
    model = config.model
    model.update(width=64, num_layers=2, attention=("kda", "mla"))
    model.kda.update(num_heads=2)
    model.mla.update(num_heads=2)
    model.ffn.update(num_dense_layers=2, width=256)
    model.vision = common.vision()
    # One row holds about six pictures, of 8 patches and 2 positions each.
    config.data.sources = ("words:8192", "")
    config.data.mixture = ((0.0, 0.75, 0.25),)
    config.data.validation_fraction = 0.03
    config.optimizer.update(learning_rate=5e-3)
    config.train.update(
        steps=600,
        batch_size=16,
        seq_len=64,
        row_patches=80,
        row_items=10,
        log_every=20,
        eval_every=100,
        checkpoint_every=300,
    )
    config.sample.update(num_tokens=60)
    return config
