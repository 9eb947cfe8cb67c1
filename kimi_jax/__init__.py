"""kimi_jax: study, train and run Kimi-K3-style language models in JAX.

Reading order: `config` (every switch), `layout` (how layers become scans), `modules`
(linen modules that own parameters), `ops` (pure functions that hold the maths),
`train` (optimizer, step, checkpoints, loop).

Tensors carry their shape in their name, one letter an axis:

    B batch          H heads         C chunk of time       S residual-bank slots
    T time           K key width     N chunks, or tokens   L latent width of experts
    D model width    V value width   E experts             F hidden width of an FFN
    W vocabulary     R low rank      A active experts      G key-value head groups
"""
