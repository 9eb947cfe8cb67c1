"""Pure functions that hold the maths of the model; no parameters, no state.

Import the file you need (`from kimi_jax.ops import attention`); nothing is
re-exported here. Each operation ships beside an obviously correct reference.

segments       where documents start inside packed rows
norms          RMSNorm, and RMSNorm with a sigmoid gate
activations    SiTU-GLU and SwiGLU
conv           causal depthwise short convolution with a decode tail
rotary         rotary positions, for the `rope` ablation
attention      block-wise causal softmax attention; attention_blocks has its loops
cross_entropy  loss over token chunks, logits never whole
residuals      the depth mix of Block Attention Residuals
context        what ranks that split time between them tell each other
context_kda, context_conv, context_attention  these operations with time split
routing, balancing, experts  Stable LatentMoE and Quantile Balancing
"""
