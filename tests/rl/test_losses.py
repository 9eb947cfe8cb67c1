"""The loss and its gradient against loops over tokens, written plainly in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.rl import losses
from kimi_jax.rl.experience import Experience


@dataclasses.dataclass(frozen=True)
class Settings:
    """What configs hold; see `config.RL`."""

    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.3
    correction_cap: float | None = None
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    distill_weight: float = 0.0
    aggregate: str = "token"
    replay_routes: bool = True
    update_balance: bool = True
    segment: int | None = None


CASES = {
    "token": Settings(),
    "sequence mean": Settings(aggregate="sequence"),
    "sequence ratio": Settings(ratio="sequence", clip_low=0.02, clip_high=0.05),
    "gspo": Settings(
        ratio="sequence", aggregate="sequence", clip_low=0.02, clip_high=0.05
    ),
    "corrected": Settings(correction_cap=1.05),
    "kl": Settings(kl_weight=0.3),
    "entropy": Settings(entropy_weight=0.2, aggregate="sequence"),
    "distilled": Settings(distill_weight=0.5),
    "all": Settings("sequence", 0.03, 0.04, 1.1, 0.1, 0.05, 0.7, "sequence"),
}
B, T = 3, 12


def draw(seed=0, **changes):
    """(logprob_BT, entropy_BT), experience: several documents, and a bare row."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((B, T), np.int32)
    ids[0, :5], ids[0, 5:9], ids[0, 9:11] = 1, 2, 3
    ids[1] = 1
    weights = (ids > 0) * (rng.random((B, T)) < 0.7)
    weights[0, 9:11] = 0  # a document of the environment alone
    base = rng.normal(-2, 0.5, (B, T))
    near = {name: base + rng.normal(0, 0.2, (B, T)) for name in ("mu", "old", "ref")}
    experience = Experience(
        *(np.zeros((B, T), np.int32),) * 2,
        ids,
        weights.astype(float),
        rng.normal(size=(B, T)),
        near["mu"],
        near["ref"],
        None,
        near["old"],
        base + rng.normal(0, 0.4, (B, T)),
    )
    return (base, rng.uniform(1, 2, (B, T))), experience._replace(**changes)


def by_loops(pi, entropy, e, s):
    """The mean loss; pi may be perturbed, what is constant to the gradient is given."""
    pi, constant = pi
    documents = [
        [(b, t) for t in range(T) if e.segment_ids_BT[b, t] == i and e.weights_BT[b, t]]
        for b in range(B)
        for i in (1, 2, 3)
    ]
    documents = [tokens for tokens in documents if tokens]
    means = []
    for tokens in documents:
        mean = np.mean([constant[at] - e.old_BT[at] for at in tokens])
        own = []
        for at in tokens:
            ratio = np.exp(pi[at] - e.old_BT[at])
            if s.ratio == "sequence":
                ratio = np.exp(mean + pi[at] - constant[at])
            A = e.advantages_BT[at]
            A += s.distill_weight * (e.teacher_BT[at] - constant[at])
            if A > 0:
                loss = -min(ratio, 1 + s.clip_high) * A
            else:
                loss = -max(ratio, 1 - s.clip_low) * A
            if s.correction_cap is not None:
                late = np.exp(e.old_BT[at] - e.behaviour_BT[at])
                loss *= min(late, s.correction_cap)
            x = e.reference_BT[at] - pi[at]
            loss += s.kl_weight * (np.exp(x) - x - 1)
            own.append(loss - s.entropy_weight * entropy[at])
        means.append(own)
    if s.aggregate == "sequence":
        return np.mean([np.mean(own) for own in means])
    return np.mean(np.concatenate(means))


def ours(pi, entropy, experience, settings):
    totals = losses.count(experience)
    loss_sum, report = losses.policy_loss(pi, entropy, experience, settings)
    mean = loss_sum / losses.normaliser(totals, settings.aggregate)
    return mean, losses.summary(report, totals)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_loops(name):
    settings = CASES[name]
    (pi, entropy), experience = draw()
    with jax.enable_x64(True):
        grad = jax.value_and_grad(ours, (0, 1), has_aux=True)
        (got, _), grads = grad(*map(jnp.asarray, (pi, entropy)), experience, settings)
        grads = jax.tree.map(np.asarray, grads)
    want = by_loops((pi, pi), entropy, experience, settings)
    np.testing.assert_allclose(got, want, rtol=1e-13)
    touched = 0
    for b in range(B):
        for t in range(T):
            step = np.zeros((B, T))
            step[b, t] = 1e-6
            up, down = (
                by_loops((pi + x, pi), entropy, experience, settings)
                for x in (step, -step)
            )
            slope = (up - down) / 2e-6
            np.testing.assert_allclose(grads[0][b, t], slope, atol=1e-8)
            touched += slope != 0
            if not experience.weights_BT[b, t]:
                assert grads[0][b, t] == grads[1][b, t] == 0
    assert touched > 5
    share = -settings.entropy_weight
    np.testing.assert_allclose(grads[1].sum(), share, atol=1e-12)


def test_metrics_are_what_they_are_called():
    settings = dataclasses.replace(CASES["all"], ratio="token")
    (pi, entropy), e = draw()
    with jax.enable_x64(True):
        _, got = ours(*map(jnp.asarray, (pi, entropy)), e, settings)
    own = e.weights_BT > 0
    ahead, ratio = (pi - e.behaviour_BT)[own], np.exp(pi - e.old_BT)[own]
    A = (e.advantages_BT + 0.7 * (e.teacher_BT - pi))[own]
    late, weight = np.exp(e.old_BT - e.behaviour_BT)[own], np.exp(ahead)
    x = (e.reference_BT - pi)[own]
    want = {
        "kl_sampler_k1": -ahead.mean(),
        "kl_sampler_k3": (np.exp(ahead) - 1 - ahead).mean(),
        "logprob_gap": np.abs(ahead).mean(),
        "logprob_gap_max": np.abs(ahead).max(),
        "clip_low": ((A < 0) & (ratio < 0.97)).mean(),
        "clip_high": ((A > 0) & (ratio > 1.04)).mean(),
        "correction": late.mean(),
        "correction_capped": (late > 1.1).mean(),
        "entropy": entropy[own].mean(),
        "effective_samples": weight.sum() ** 2 / (weight**2).sum() / own.sum(),
        "ratio_max": ratio.max(),
        "policy_share": own.sum() / (e.segment_ids_BT > 0).sum(),
        "kl_reference": (np.exp(x) - 1 - x).mean(),
        "kl_teacher": (pi - e.teacher_BT)[own].mean(),
    }
    assert set(got) == set(want) and 0 < want["clip_low"] < 1
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, err_msg=name)


def test_without_old_log_probabilities_the_sampler_is_the_old_policy():
    (pi, entropy), e = draw()
    with jax.enable_x64(True):
        settings = Settings(correction_cap=1.0)
        got, metrics = ours(pi, entropy, e._replace(old_BT=None), settings)
        want, _ = ours(pi, entropy, e._replace(old_BT=e.behaviour_BT), Settings())
    assert float(got) == float(want) and float(metrics["correction"]) == 1


def test_micro_batches_add_up_to_the_batch():
    (pi, entropy), experience = draw()
    for settings in (CASES["token"], CASES["gspo"]):
        with jax.enable_x64(True):
            whole, _ = ours(pi, entropy, experience, settings)
            by = losses.normaliser(losses.count(experience), settings.aggregate)
            parts = 0.0
            for row in range(B):
                one = slice(row, row + 1)
                part = jax.tree.map(lambda x, one=one: x[one], experience)
                share, _ = losses.policy_loss(pi[one], entropy[one], part, settings)
                parts += share / by
        np.testing.assert_allclose(parts, whole, rtol=1e-14)


def test_absurd_ratios_and_empty_batches_stay_finite():
    drawn = jax.tree.map(lambda x: x.astype(np.float32), draw())
    (pi, entropy), experience = drawn
    ids_BT = experience.segment_ids_BT.astype(np.int32)
    experience = experience._replace(segment_ids_BT=ids_BT)
    settings = CASES["all"]
    far = experience._replace(
        old_BT=experience.old_BT - 1e4, behaviour_BT=experience.behaviour_BT + 1e5
    )
    bare = experience._replace(weights_BT=experience.weights_BT * 0)
    for case in (far, bare):
        grad = jax.value_and_grad(ours, has_aux=True)
        (loss, metrics), grads = grad(jnp.asarray(pi), entropy, case, settings)
        assert all(np.isfinite(x).all() for x in (loss, grads, *metrics.values()))
    assert float(loss) == 0 and not np.asarray(grads).any()


@pytest.mark.parametrize("field", ["kl_weight", "distill_weight"])
def test_a_term_without_its_policy_is_refused(field):
    (pi, entropy), experience = draw(reference_BT=None, teacher_BT=None)
    with pytest.raises(UserError, match=rf"config.rl.{field}=0.5.*score it under"):
        losses.policy_loss(pi, entropy, experience, Settings(**{field: 0.5}))
