r"""A small K3 with a vision tower learns to read numbers that are drawn on the spot.

Question: does the image path learn from nothing, jointly with text?
Command:  python -m experiments.train --config=configs/vision_words.py \
              --workdir=runs/vision_words
Cost:     TBD
Expect:   TBD
"""

from configs import common


def get_config(arg=""):
    text = common.parse_arg(arg, text=0)["text"]
    config = common.base()
    config.name = "vision_words"
    model = config.model
    model.update(width=64, num_layers=2, attention=("kda", "mla"))
    model.kda.update(num_heads=2)
    model.mla.update(num_heads=2)
    model.ffn.update(num_dense_layers=2, width=256)
    model.vision = common.vision()
    config.data.sources = ("words:16384",)
    if text:
        config.data.sources += ("",)
        config.data.mixture = ((0.0, 100.0 - text, float(text)),)
    config.data.validation_fraction = 0.03
    config.optimizer.update(learning_rate=5e-3)
    # A row holds twelve pictures, of 8 patches and 2 positions each.
    config.train.update(
        steps=500,
        batch_size=16,
        seq_len=64,
        row_patches=96,
        row_items=12,
        log_every=20,
        eval_every=100,
        checkpoint_every=250,
    )
    config.sample.update(num_tokens=60)
    return config
