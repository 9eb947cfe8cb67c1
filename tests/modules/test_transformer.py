"""The scanned model equals its unrolled definition, and respects documents and time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import canonical
from kimi_jax.modules import transformer
from tests import tiny
from tests.modules import unrolled

# Every switch of the model in as few, and as small, models as cover them: compiling
# different layers takes the time.
ONE_LAYER = "model.num_layers=2 model.residual.block_size=1"
NO_MOE = f"{ONE_LAYER} model.ffn.num_dense_layers=2"
MODELS = {
    # Two equal blocks of two equal layers: both scans repeat.
    "folded": "model.num_layers=4 model.attention=kda model.residual.block_size=2 "
    "model.ffn.num_dense_layers=4",
    # Two equal blocks, each of two equal layers and a third.
    "runs_in_a_block": "model.attention=gqa,gqa,mla model.ffn.num_dense_layers=6",
    "blocks_in_a_body": "model.attention=gqa,mla model.residual.block_size=1 "
    "model.num_layers=4 model.ffn.num_dense_layers=4",
    "full_residuals_mla_rope": f"{NO_MOE} model.attention=mla "
    "model.residual.block_size=0.5 model.mla.positions=rope model.mla.rope_base=100 "
    "model.mla.q_rank=none model.mla.output_gate=false",
    "additive_kda_softplus": f"{NO_MOE} model.attention=kda model.kda.gate=softplus "
    "model.kda.output_gate=low_rank model.kda.value_dim=4 "
    "model.residual.kind=additive",
    "kda_head": f"{NO_MOE} model.attention=kda model.kda.gate_granularity=head "
    "model.kda.output_gate=none model.kda.conv_width=none "
    "model.kda.gate_lower_bound=-1.0 model.kda.implementation=reference",
    "plain_gqa_rope": f"{ONE_LAYER} model.attention=gqa model.residual.kind=none "
    "model.gqa.positions=rope",
    "swiglu_no_latent_threshold": f"{ONE_LAYER} model.attention=gqa "
    "model.ffn.activation=swiglu model.moe.latent_width=none "
    "model.moe.latent_norm=false model.moe.routed_scaling=2.5 "
    "model.moe.balancing.method=quantile_threshold",
    "latent_router": f"{ONE_LAYER} model.attention=gqa model.moe.router_input=latent "
    "model.moe.latent_norm=false model.moe.num_shared=0 model.moe.implementation=dense",
}
SEGMENTS = np.array([[1] * 7 + [2] * 13 + [3] * 4 + [0] * 4, [1] * 28], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 28)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_scans_equal_the_unrolled_model_in_float64(name):
    with jax.enable_x64(True):
        model = tiny.make("model.dtype=float64", *MODELS[name].split()).model
        variables = tiny.variables(model)
        probe = jnp.asarray(np.random.default_rng(1).normal(size=(2, 28, 16)))

        def loss(h_BTD):
            return jnp.sum(h_BTD * probe * (SEGMENTS > 0)[..., None])

        def scanned(variables):
            return loss(transformer.apply(model, variables, TOKENS, SEGMENTS).h_BTD)

        def plain(variables):
            return loss(unrolled.forward(model, variables, TOKENS, SEGMENTS))

        got = jax.jit(jax.value_and_grad(scanned))(variables)
        want = jax.jit(jax.value_and_grad(plain))(variables)
        largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(want))
        chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12 * largest)
        for key, grad in canonical.flatten(model, got[1]["params"]).items():
            # The first sublayer has one source, the first block no block before it, and
            # this loss stops at the hidden states.
            inert = key.startswith(("layer_000/attention/residual", "block_000"))
            inert |= key == "output/unembed"
            assert bool(jnp.any(grad != 0)) != inert, key


def test_remat_changes_nothing():
    with jax.enable_x64(True):
        model = tiny.make(
            "model.dtype=float64", "model.attention=gqa", "model.ffn.num_dense_layers=6"
        ).model
        variables = tiny.variables(model)

        def loss(variables, remat):
            out = transformer.apply(model, variables, TOKENS, SEGMENTS, remat=remat)
            return jnp.sum(jnp.sin(out.h_BTD))

        grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        plain = grad(variables, "none")
        largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(plain))
        for remat in ("unit", "nested"):  # "block" is the outer half of "nested"
            again = grad(variables, remat)
            chex.assert_trees_all_close(again, plain, rtol=1e-13, atol=1e-13 * largest)


def test_what_a_layer_keeps_is_told_to_its_kernel():
    one = ("model.num_layers=1", "model.attention=kda", "model.ffn.num_dense_layers=1")

    def checkpoints(residuals):
        model = tiny.make(*one, f"model.kda.residuals={residuals}").model

        def forward(variables):
            return transformer.apply(model, variables, TOKENS).h_BTD

        return str(jax.make_jaxpr(forward)(tiny.variables(model))).count("policy=")

    kept = checkpoints("all")
    assert checkpoints("states") == checkpoints("none") == kept + 1


# One layer of each kind, of attention as of FFN.
EACH = ("model.num_layers=2", "model.attention=kda,mla", "model.residual.block_size=1")


def test_no_token_sees_a_later_one():
    model = tiny.make(*EACH).model
    variables = tiny.variables(model)
    apply = jax.jit(lambda tokens: transformer.apply(model, variables, tokens).h_BTD)
    changed = TOKENS.copy()
    changed[:, 17:] += 1
    before, after = apply(TOKENS), apply(changed)
    chex.assert_trees_all_equal(before[:, :17], after[:, :17])
    assert float(jnp.max(jnp.abs(before[:, 17:] - after[:, 17:]))) > 1e-3


def test_packed_documents_equal_separate_ones():
    """Row 0 holds three documents, rows 1 to 3 one of them each, at the start."""
    with jax.enable_x64(True):
        model = tiny.make(
            *EACH, "model.dtype=float64", "model.mla.positions=rope"
        ).model
        variables = tiny.variables(model)
        tokens, segments = np.zeros((2, 4, 28), np.int32)
        tokens[0], segments[0] = TOKENS[0], SEGMENTS[0]
        places = [np.flatnonzero(SEGMENTS[0] == i) for i in (1, 2, 3)]
        for row, at in enumerate(places, start=1):
            tokens[row, : len(at)], segments[row, : len(at)] = TOKENS[0, at], 1
        apply = jax.jit(lambda *x: transformer.apply(model, variables, *x).h_BTD)
        h = apply(tokens, segments)
        for row, at in enumerate(places, start=1):
            chex.assert_trees_all_close(h[0, at], h[row, : len(at)], rtol=1e-11)


def test_padding_is_inert():
    model = tiny.make(*EACH).model
    variables = tiny.variables(model)
    apply = jax.jit(
        lambda tokens: transformer.apply(model, variables, tokens, SEGMENTS)
    )
    changed = np.where(SEGMENTS == 0, 5, TOKENS)
    chex.assert_trees_all_equal(
        *(apply(t).h_BTD * (SEGMENTS > 0)[..., None] for t in (TOKENS, changed))
    )


@pytest.fixture(scope="module")
def fresh():
    """First values of a model with one layer of each kind."""
    init = jax.jit(transformer.init, static_argnums=0)
    return init(tiny.make(*EACH).model, jax.random.key(0))


def test_fresh_attention_residuals_are_a_plain_mean(fresh):
    """Zero queries: at the start every sublayer reads the mean of its sources."""
    apply = jax.jit(transformer.apply, static_argnums=0, static_argnames="observe")
    out = apply(tiny.make(*EACH).model, fresh, TOKENS, SEGMENTS, observe=True)
    totals = out.stats["output"]["residual"]["depth_weights"]
    np.testing.assert_allclose(totals, np.full(3, (SEGMENTS > 0).sum() / 3), rtol=1e-6)


def test_the_running_sum_is_measured_after_every_sublayer(fresh):
    """Where layers add nothing it stays the embedding; where they do it does not."""
    model = tiny.make(*EACH, "model.residual.kind=none").model
    apply = jax.jit(transformer.apply, static_argnums=0, static_argnames="observe")

    def squares(params):
        variables = fresh | {"params": params}
        out = apply(model, variables, TOKENS, SEGMENTS, observe=True)
        flat = canonical.flatten(model, out.stats)
        return [x for name, x in flat.items() if name.endswith("/stream_square")]

    params = canonical.flatten(tiny.make(*EACH).model, fresh["params"])
    template = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    mine = {k: x for k, x in params.items() if "/residual/" not in k}
    mute = {k: 0 * x if k.startswith("layer_") else x for k, x in mine.items()}
    silent, loud = (
        squares(canonical.unflatten(model, flat, template["params"]))
        for flat in (mute, mine)
    )
    row_W = np.mean(np.square(params["embedding/embed"], dtype=np.float64), axis=-1)
    want = row_W[np.asarray(TOKENS)][np.asarray(SEGMENTS) > 0].sum()
    np.testing.assert_allclose(silent, np.full(4, want), rtol=1e-5)
    assert np.all(np.diff([want, *loud]) != 0)


def test_first_values_do_not_depend_on_the_scans(fresh):
    model = tiny.make(*EACH[:2], "model.residual.block_size=2").model
    other = jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(0))
    chex.assert_trees_all_equal(
        canonical.flatten(tiny.make(*EACH).model, fresh),
        canonical.flatten(model, other),
    )


def test_kda_starts_with_long_memory(fresh):
    """The first decays lie between -0.48 and -0.005 nats a token, not at -2.5."""
    own = canonical.flatten(tiny.make(*EACH).model, fresh)
    decay = -5.0 * jax.nn.sigmoid(own["params/layer_000/attention/kda/dt_bias"])
    assert float(decay.min()) > -0.4759 and float(decay.max()) < -0.0049
    assert not own["params/layer_000/attention/kda/A_log"].any()


def test_matrices_start_at_the_configured_scale(fresh):
    own = canonical.flatten(tiny.make(*EACH).model, fresh)
    values = jnp.concatenate(
        [own[f"params/{n}"].ravel() for n in ("embedding/embed", "output/unembed")]
    )
    np.testing.assert_allclose(values.std(), 0.2, rtol=0.03)
    assert not bool(
        (own["params/embedding/embed"] == own["params/output/unembed"].T).any()
    )
