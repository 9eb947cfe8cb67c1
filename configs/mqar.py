r"""Two layers, KDA and MLA, learn multi-query associative recall.

Question: does a hybrid of two layers look up any of several pairs that it has read?
Command:  python -m experiments.train --config=configs/mqar.py --workdir=runs/mqar
Cost:     about a minute of CPU time, half of it compilation.
Expect:   99 % of the answers right on new instances, and as many in instances that are
          two and four times as long.

`:pairs=16,length=64` sets load and length; `--config.data.sources=task:palindrome` and
the other tasks of docs/evaluations.md train in the same way.
"""

from configs import common

SYMBOLS = 64


def get_config(arg: str = ""):
    dials = common.parse_arg(arg, pairs=8, length=32)
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
    model.residual.kind = "additive"  # two layers leave nothing to choose from
    config.optimizer.update(learning_rate=1.5e-2, weight_decay=0.0)
    config.train.update(
        steps=200,
        batch_size=32,
        seq_len=dials["length"],
        log_every=20,
        eval_every=20,
        eval_batches=8,
        eval_length_multiples=(1, 2, 4),
        checkpoint_every=200,
    )
    config.sample.update(prompt="", num_tokens=16)
    return config
