"""Kimi Delta Attention: a linear-attention state with per-channel decay.

For each head, with state S [K,V], log decay g <= 0 and write strength beta:

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
    o_t = scale S_t^T q_t

`kda` runs whole sequences, `kda_step` one token. Sources: Kimi K3 report, Eq. 1 and 5;
Kimi Linear report, Eq. 1 and 6-9.
"""

from pallas_kernels.kda.api import choose_implementation, kda, kda_step

__all__ = ["choose_implementation", "kda", "kda_step"]
