"""From stacked statistics to lists by layer, against numbers put in by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.modules import statistics
from kimi_jax.ops.decay import EDGES
from kimi_jax.train import health
from tests import tiny

# Layers: kda + mlp, then mla + moe, kda + moe, folded into stages of one block each.
MODEL = tiny.make(
    "model.num_layers=3", "model.attention=kda,mla", "model.residual.block_size=3"
).model
LOAD = np.array([[4, 0, 2, 2], [8, 0, 0, 0]])


def stacked():
    """Names as the scans of MODEL give them, values by layer."""
    stats, balance = {}, {}
    runs = {0: "stage_0/block_0_run_0", 1: "stage_0/block_0_run_1"}
    runs[2] = "stage_0/block_0_run_2"

    def put(layer, part, name, value):
        stats[f"{runs[layer]}/sublayer_{part}/{name}"] = jnp.asarray(value)[None, None]

    put(0, 1, "mlp/hidden_max", 7.0)
    for layer, load, dropped, bare in ((1, LOAD[0], 0, 0), (2, LOAD[1], 2, 1)):
        put(layer, 1, "moe/load_E", load)
        put(layer, 1, "moe/tokens", 4)
        put(layer, 1, "moe/dropped_slots", dropped)
        put(layer, 1, "moe/unrouted_tokens", bare)
        put(layer, 1, "moe/hidden_max", 10.0 * layer)
        put(layer, 1, "moe/shared/hidden_max", 0.5 * layer)
        put(layer, 1, "moe/bias_update", 0.01 * layer)
        bias = jnp.arange(4.0)[None, None] * layer
        balance[f"{runs[layer]}/sublayer_1/moe/bias"] = bias
    for layer in range(3):
        put(layer, 0, "stream_square", 4.0**layer)
        put(layer, 1, "stream_square", 9.0)
    for layer in (0, 2):
        above = (EDGES < 0.125).astype(float) * 8  # of 8 sampled tokens: all at 1/8
        put(layer, 0, "kda/decay_above_Q", above)
        put(layer, 0, "kda/at_bound", 2.0)
        put(layer, 0, "kda/beta", 4.0 + layer)
        put(layer, 0, "kda/sampled", 8)
        put(layer, 0, "kda/state_square", 27.0)
        put(layer, 0, "kda/state_rows", 3)
        put(layer, 0, "kda/tile_decay", 40.0 + layer)
    return stats, balance


def test_lists_by_layer():
    got = health.layer_metrics(MODEL, *stacked())
    want = {
        "moe/layer_index": [1, 2],
        "moe/max_violation": [1.0, 3.0],
        "moe/dead_experts": [1, 3],
        "moe/bias_range": [3.0, 6.0],
        "moe/bias_update": [0.01, 0.02],
        "moe/dropped_share": [0.0, 0.2],
        "moe/unrouted_share": [0.0, 0.25],
        "moe/activation_max": [10.0, 20.0],
        "moe/shared_activation_max": [0.5, 1.0],
        "kda/layer_index": [0, 2],
        "kda/at_bound": [0.25, 0.25],
        "kda/beta": [0.5, 0.75],
        "kda/state_rms": [3.0, 3.0],
        "kda/tile_decay": [40.0, 42.0],
        "residual/rms": [1.0, 3.0, 2.0, 3.0, 4.0, 3.0],
        "mlp/layer_index": [0],
        "mlp/activation_max": [7.0],
    }
    for name, values in want.items():
        np.testing.assert_allclose(got.pop(name), values, rtol=1e-6, err_msg=name)
    share = np.array([0.5, 0.25, 0.25])
    entropy = [-(share * np.log(share)).sum() / np.log(4), 0.0]
    np.testing.assert_allclose(got.pop("moe/load_entropy"), entropy, atol=1e-6)
    for percent in ("05", "50", "95"):
        alpha = got.pop(f"kda/alpha_q{percent}")
        # Between the edges on both sides of 1/8.
        assert np.exp(-0.125 * 2**0.5) < alpha[0] < np.exp(-0.125 / 2**0.5)
    assert not got


def test_idle_experts_by_layer():
    loads = health.expert_loads(stacked()[0])
    assert health.idle_experts(MODEL, loads) == {"1": [1], "2": [1, 2, 3]}
    twice = {name: 2 * x + 1 for name, x in loads.items()}
    assert health.idle_experts(MODEL, twice) == {}


def test_reports_of_micro_batches_combine_by_the_table():
    tokens = jnp.asarray(4)
    summed = {"a/moe/load_E": jnp.array([3, 1]), "a/depth_weights": jnp.array([6.0, 2])}
    listed = {
        "a/moe/hidden_max": jnp.array([[1.0], [5.0]]),
        "a/moe/margin_NE": jnp.arange(12.0).reshape(2, 1, 3, 2),
    }
    assert statistics.partition(summed | listed) == (summed, listed)
    got = statistics.combine(summed, listed, tokens)
    np.testing.assert_array_equal(got["a/moe/load_E"], [3, 1])
    np.testing.assert_array_equal(got["a/depth_weights"], [1.5, 0.5])
    np.testing.assert_array_equal(got["a/moe/hidden_max"], [5.0])
    np.testing.assert_array_equal(
        got["a/moe/margin_NE"], np.arange(12.0).reshape(1, 6, 2)
    )
    with pytest.raises(ValueError, match="'spin' to REDUCTIONS"):
        statistics.reduction("a/moe/spin")
