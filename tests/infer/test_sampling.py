"""What is drawn follows the filtered softmax, and belongs to seed and position."""

import jax
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.infer.sampling import Sampling, draw, make_knobs

LOGITS = np.log(np.array([0.4, 0.05, 0.25, 0.2, 0.06, 0.04], np.float32))
N = 4000
CASES = {
    "plain": (Sampling(), [0.4, 0.05, 0.25, 0.2, 0.06, 0.04]),
    "cold": (
        Sampling(temperature=0.5),
        np.array([0.4, 0.05, 0.25, 0.2, 0.06, 0.04]) ** 2,
    ),
    "top_k": (Sampling(top_k=2), [0.4, 0, 0.25, 0, 0, 0]),
    "top_p": (Sampling(top_p=0.66), [0.4, 0, 0.25, 0.2, 0, 0]),
    "min_p": (Sampling(min_p=0.14), [0.4, 0, 0.25, 0.2, 0.06, 0]),
    "all": (Sampling(top_k=4, top_p=0.9, min_p=0.55), [0.4, 0, 0.25, 0, 0, 0]),
    "greedy": (Sampling(temperature=0.0, top_k=3), [1, 0, 0, 0, 0, 0]),
}


@pytest.fixture(scope="module")
def run():
    """Draws of N rows, the cases in turns, in one call."""
    chosen = [CASES[name][0] for name in CASES]
    rows = [(chosen[i % len(chosen)], i) for i in range(N * len(chosen))]
    compiled = jax.jit(draw)

    def run(seed=0, allowed=(True,) * 6):
        logits = np.tile(LOGITS, (len(rows), 1))
        position = np.full(len(rows), seed, np.int32)
        token, logprob = compiled(logits, position, make_knobs(rows), np.array(allowed))
        return np.asarray(token).reshape(N, -1), np.asarray(logprob).reshape(N, -1)

    return run


def test_frequencies(run):
    token, logprob = run()
    for column, (name, (_, weights)) in enumerate(CASES.items()):
        want = np.array(weights) / np.sum(weights)
        got = np.bincount(token[:, column], minlength=6) / N
        assert (got[want == 0] == 0).all(), name
        # Five standard deviations of a share of N draws are 0.04 at most.
        np.testing.assert_allclose(got, want, atol=0.04, err_msg=name)
    # Of the model itself, whatever the filters.
    np.testing.assert_allclose(logprob, LOGITS[token], atol=1e-5)


def test_forbidden_tokens_are_never_drawn(run):
    token, _ = run(1, np.array([False, True, True, True, True, True]))
    assert (token > 0).all() and (token[:, list(CASES).index("greedy")] == 2).all()


def test_positions_draw_anew(run):
    same = (run(2)[0] == run(3)[0])[:, 0].mean()
    assert same == pytest.approx(np.sum(np.exp(2 * LOGITS)), abs=0.05)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0: must be in"),
        ({"min_p": 1.5}, "min_p=1.5: must be in"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        Sampling(**setting)
