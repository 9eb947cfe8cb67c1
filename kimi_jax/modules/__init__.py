"""Linen modules: they own parameters and call one function of `ops` each.

`kda`, `mla`, `gqa` are the attention layers, `mlp` and `moe` the feed-forward layers,
`sublayer` puts a norm and the residual scheme around one of them, and `transformer`
scans sublayers into a model.
"""
