"""Wrong arguments raise ValueError that says what came, what fits and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import choose_implementation, kda, kda_step

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
GATE = {
    "A_log": jnp.zeros(HV),
    "dt_bias": jnp.zeros(HV * K),
    "use_gate_in_kernel": True,
}


def arguments(**changes):
    x = {
        "q": jnp.ones((B, T, H, K)),
        "k": jnp.ones((B, T, H, K)),
        "v": jnp.ones((B, T, HV, V)),
        "g": -jnp.ones((B, T, HV, K)),
        "beta": jnp.ones((B, T, HV)),
    }
    return {**x, **changes}


# Name, what is wrong, fragments of the message.
WRONG = {
    "q without heads": ({"q": jnp.ones((B, T, K))}, "q has shape (2, 5, 8)", "heads"),
    "k": ({"k": jnp.ones((B, T, H, V))}, "k has shape (2, 5, 2, 6)", "(2, 5, 2, 8)"),
    "v time": ({"v": jnp.ones((B, T + 1, HV, V))}, "v has shape", "(2, 5, 4, 6)"),
    "v flat": ({"v": jnp.ones((B, T, HV * V))}, "v has shape", "[B, T, HV, V]"),
    "heads": ({"v": jnp.ones((B, T, 3, V))}, "HV=3", "multiple of H"),
    "no heads": ({"q": jnp.ones((B, T, 0, K))}, "must not be 0"),
    "g per head": ({"g": jnp.ones((B, T, HV))}, "g has shape", "g[..., None]"),
    "g of qk heads": ({"g": jnp.ones((B, T, H, K))}, "g has shape", "repeat it"),
    "beta per token": ({"beta": jnp.ones((B, T))}, "beta has shape (2, 5)", "per head"),
    "beta axis": ({"beta": jnp.ones((B, T, HV, 1))}, "beta[..., 0]"),
    "A_log": ({**GATE, "A_log": jnp.zeros(H)}, "A_log has shape (2,)", "= (4,)"),
    "dt_bias per head": ({**GATE, "dt_bias": jnp.zeros(HV)}, "jnp.repeat(dt_bias, K)"),
    "dt_bias 2d": ({**GATE, "dt_bias": jnp.zeros((HV, K))}, "dt_bias.reshape(-1)"),
    "state transposed": ({"initial_state": jnp.zeros((B, HV, V, K))}, "jnp.swapaxes"),
    "state batch": ({"initial_state": jnp.zeros((1, HV, K, V))}, "one state per row"),
    "state dtype": (
        {"initial_state": jnp.zeros((B, HV, K, V), jnp.bfloat16)},
        "initial_state has dtype bfloat16, expected float32",
    ),
    "segment shape": ({"segment_ids": jnp.ones(T, jnp.int32)}, "[B, T] = (2, 5)"),
    "segment dtype": ({"segment_ids": jnp.ones((B, T))}, "float32, expected int32"),
    "segment again": (
        {"segment_ids": jnp.array([[1, 1, 2, 2, 0], [0, 3, 2, 0, 3]])},
        "row 1 has id 3 again at token 4",
        "number documents apart",
    ),
    "segment padding": (
        {"segment_ids": jnp.array([[1, 1, 2, -1, -1], [1, 1, 1, 1, 1]])},
        "segment_ids has -1 at [0, 3]",
        "0 for padding",
    ),
    "segment width": (
        {"segment_ids": np.full((B, T), 2**32 + 1)},
        "has 4294967297 at [0, 0]",
        "1 to 2147483647",
    ),
    "no rows": ({"q": jnp.ones((0, T, H, K))}, "rows, heads and head width"),
    "nothing": ({"k": None, "g": None}, "k, g is None"),
    "chunk of text": ({"chunk_size": "64"}, "chunk_size='64'", "integers"),
    "chunk of a float": ({"chunk_size": 64.0}, "chunk_size=64.0", "integers"),
    "infinite scale": ({"scale": float("inf")}, "scale=inf: must be finite"),
    "float16": ({"v": jnp.ones((B, T, HV, V), jnp.float16)}, "v has dtype float16"),
    "integers": ({"q": jnp.ones((B, T, H, K), int)}, "q has dtype int32"),
    "chunk": ({"chunk_size": 48}, "chunk_size=48", "16, 32, 64, 128"),
    "residuals": ({"residuals": "some"}, "residuals='some'", "all, states, none"),
    "bound low": ({"lower_bound": -5.5}, "lower_bound=-5.5", "[-5.0, 0)"),
    "bound zero": ({"lower_bound": 0.0}, "lower_bound=0.0"),
    "bound nan": ({"lower_bound": float("nan")}, "lower_bound=nan"),
    "scale": ({"scale": jnp.ones(())}, "scale=", "not a Python number"),
    "gate unused": ({"A_log": jnp.zeros(HV)}, "use_gate_in_kernel=True"),
    "gate without slope": ({"use_gate_in_kernel": True}, "A_log is None"),
    "eigenvalues": ({"allow_neg_eigval": True}, "use_beta_sigmoid=True"),
    "implementation": ({"implementation": "cuda"}, "'cuda'", "'xla', 'reference'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_message(case):
    changes, *fragments = WRONG[case]
    with pytest.raises(ValueError) as error:
        kda(**arguments(**changes))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_message_of_a_single_step():
    x = {name: value[:, 0] for name, value in arguments().items()}
    with pytest.raises(ValueError, match=r"beta has shape \(2,\), expected \[B, HV\]"):
        kda_step(**{**x, "beta": jnp.ones(B)}, state=jnp.zeros((B, HV, K, V)))
    with pytest.raises(ValueError, match=r"state has shape .*jnp.swapaxes"):
        kda_step(**x, state=jnp.zeros((B, HV, V, K)))
    with pytest.raises(
        ValueError, match=r"q has shape .*, expected 3 axes \[B, H, K\]"
    ):
        kda_step(**arguments(), state=jnp.zeros((B, HV, K, V)))


def test_choice_of_implementation():
    name, reason = choose_implementation(None, "cpu")
    assert name == "xla" and "this is cpu" in reason
    assert choose_implementation("reference", "cpu")[0] == "reference"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_dtypes(dtype):
    x = {name: value.astype(dtype) for name, value in arguments().items()}
    o, state = jax.eval_shape(lambda x: kda(**x), x)
    assert o.dtype == dtype and state is None
    o, state = jax.eval_shape(lambda x: kda(**x, output_final_state=True), x)
    assert o.dtype == dtype and state.dtype == jnp.float32
    token = {name: value[:, -1] for name, value in x.items()}
    o, state = jax.eval_shape(lambda x, s: kda_step(**x, state=s), token, state)
    assert o.dtype == dtype and state.dtype == jnp.float32


def test_numpy_arrays_and_default_scale():
    x = {name: np.array(value) for name, value in arguments().items()}
    o, _ = jax.jit(lambda: kda(**x))()
    same, _ = jax.jit(lambda: kda(**arguments(), scale=K**-0.5))()
    np.testing.assert_array_equal(o, same)


def test_bounded_gate_does_without_its_slope():
    settings = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    o, _ = jax.jit(lambda: kda(**arguments(), **settings))()
    settings["A_log"] = jnp.zeros(HV)
    same, _ = jax.jit(lambda: kda(**arguments(), **settings))()
    np.testing.assert_array_equal(o, same)
