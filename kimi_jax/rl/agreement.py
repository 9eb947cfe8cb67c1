"""How far the sampler and the learner differ on the same tokens, on the host.

Both run the same weights, the sampler token by token from a cache, the learner on whole
rows. What is left are other orders of summation, and, where those tip a router over,
other experts.
"""

from __future__ import annotations

import numpy as np


def agreement(
    sampler_BT: np.ndarray, learner_BT: np.ndarray, weights_BT: np.ndarray
) -> dict[str, float]:
    """Metrics over the policy tokens, all 0 if there are none.

    gap_mean and gap_max: of |log p - log q|, in nats, p the sampler and q the learner.
    kl_k1, the mean of log p - log q, and kl_k3, of q / p - 1 - log q / p, estimate
    KL(p || q), nats a token; the second is never negative and varies less.

    Args:
      sampler_BT, learner_BT: log-probabilities of the same tokens, of any shape.
      weights_BT: 0 for what the policy did not write.
    """
    own = np.asarray(weights_BT) > 0
    ahead = (np.asarray(learner_BT, float) - np.asarray(sampler_BT, float))[own]
    if not len(ahead):
        ahead = np.zeros(1)
    with np.errstate(over="ignore"):  # two that differ by so much do differ by inf
        k3 = np.expm1(ahead) - ahead
    return {
        "gap_mean": float(np.abs(ahead).mean()),
        "gap_max": float(np.abs(ahead).max()),
        "kl_k1": float(-ahead.mean()),
        "kl_k3": float(k3.mean()),
    }


def routing_overlap(
    sampler: np.ndarray, learner: np.ndarray, num_experts: int
) -> dict[str, float]:
    """How many of the sampler's experts the learner chose too.

    Args:
      sampler, learner: int [..., L, A] of the same tokens; num_experts: no expert.
        Tokens for which the sampler has none in any layer are padding.

    Returns:
      slots, the share of the sampler's slots; tokens, the share of its tokens all of
      whose experts in all layers are the learner's. 1 if there are none.
    """
    L, A = sampler.shape[-2:]
    sampler, learner = (np.asarray(x).reshape(-1, L, A) for x in (sampler, learner))
    used = sampler < num_experts
    same = used & np.any(sampler[..., :, None] == learner[..., None, :], axis=-1)
    real = used.any(axis=(1, 2))
    whole = np.all(same == used, axis=(1, 2)) & real
    return {
        "slots": float(same.sum() / used.sum()) if used.any() else 1.0,
        "tokens": float(whole.sum() / real.sum()) if real.any() else 1.0,
    }
