"""Tasks that are generated: numpy alone, each instance a function of (seed, index).

    example    what an instance is, drawing one, the digest of many
    recall     MQAR, copy, palindrome
    state      stacks, products of permutations
    text       prose to hide things in, and prompts of a given length
    needles    needles in a haystack: one, many keys, values, queries
    tracing    variables followed through a text, common and frequent words
    questions  questions on generated documents
    specs      "mqar:length=256:pairs=16": the names and the dials of all of them

Training reads them by `config.data.sources=('task:SPEC',)`, `kimi_jax.evals` scores a
model on them.
"""
