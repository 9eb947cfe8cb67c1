r"""Two layers, KDA and MLA, learn multi-query associative recall.

Question: can a hybrid of this size look up any of several pairs that it has read?
Command:  python -m experiments.train --config=configs/mqar.py --workdir=runs/mqar
Cost:     TBD
Expect:   TBD

`--config.data.sources=task:palindrome:items=8` and the other tasks of
docs/evaluations.md train in the same way; `:pairs=16,length=128` sets load and length.
"""

from configs import common

SYMBOLS = 64


def get_config(arg: str = ""):
    dials = common.parse_arg(arg, pairs=4, length=32)
    config = common.base()
    config.name = f"mqar_{dials['pairs']}_pairs"
    config.data.update(
        sources=(f"task:mqar:pairs={dials['pairs']}:symbols={SYMBOLS}",),
        tokenizer=f"symbols:{SYMBOLS + 1}",
    )
    model = config.model
    model.update(vocab_size=72, width=64, num_layers=2, attention=("kda", "mla"))
    model.kda.update(num_heads=2, key_dim=32, value_dim=32, gate_rank=16)
    model.mla.update(num_heads=2, q_rank=None, kv_rank=32, block_size=32)
    model.ffn.update(num_dense_layers=2, width=128)
    config.optimizer.update(learning_rate=1e-2, weight_decay=0.0)
    config.train.update(
        steps=400,
        batch_size=64,
        seq_len=dials["length"],
        log_every=20,
        eval_every=20,
        eval_batches=8,
        eval_length_multiples=(1, 2, 4),
        checkpoint_every=400,
    )
    config.sample.update(prompt="", num_tokens=16)
    return config
