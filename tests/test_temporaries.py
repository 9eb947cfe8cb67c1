"""Parts of the temporaries: against sizes worked out by hand."""

import dataclasses

import pytest

from kimi_jax import sharding, temporaries
from kimi_jax.rl.program import LEARNER
from kimi_jax.train.program import PRE_TRAINING, state_shape
from kimi_jax.train.step import make_transform
from tests import tiny
from tests.rl.test_step import SETTINGS

# Plain residuals and layers that keep nothing but their input where they are computed
# again: four rows of 16 tokens, 32 wide, on one device.
PLAIN = (
    "model.attention=gqa",
    "model.residual.kind=none",
    "optimizer.kind=adamw",
    "train.batch_size=4",
    "train.seq_len=16",
    "mesh.data=1",
)
STREAM = 4 * 16 * 32 * 4  # bytes of the residual stream, float32


def parts(layers, *overrides, rl=None) -> temporaries.Parts:
    cfg = tiny.make(
        "model.width=32",
        f"model.num_layers={layers}",
        f"model.ffn.num_dense_layers={layers}",
        *PLAIN,
        *overrides,
    )
    mesh = sharding.make_mesh(cfg)
    state = state_shape(cfg, mesh, make_transform(cfg))
    program = LEARNER if rl else PRE_TRAINING
    cfg = dataclasses.replace(cfg, rl=rl)
    return temporaries.parts_of(program, cfg, mesh, state)


def grown(*overrides) -> int:
    """What 16 layers keep more than 8."""
    return parts(16, *overrides).activations - parts(8, *overrides).activations


def test_unit_remat_keeps_the_input_of_every_unit():
    """A unit is one layer here, of one kind all the way down."""
    assert grown("train.remat=unit") == 8 * STREAM


def test_without_remat_a_layer_keeps_much_more():
    assert grown("train.remat=none") > 40 * STREAM


@pytest.mark.parametrize(
    "mesh", [("mesh.fsdp=2", "mesh.context=2"), ("mesh.data=2", "mesh.fsdp=2")]
)
def test_rows_and_time_are_split_over_the_mesh(mesh):
    whole, split = parts(4, "train.remat=unit"), parts(4, "train.remat=unit", *mesh)
    assert whole.activations == 4 * split.activations


def test_micro_batches_keep_only_their_own_rows():
    whole, micro = parts(2), parts(2, "train.micro_batches=4")
    assert whole.activations == 4 * micro.activations
    assert whole.gradients == micro.gradients


def test_gradients_lie_as_the_parameters_do():
    whole, split = parts(2), parts(2, "mesh.fsdp=4")
    # Gains and other vectors are whole on every device.
    assert whole.gradients / 4 < split.gradients < whole.gradients / 3.5


def test_the_learner_of_rewards_keeps_activations_too():
    scored, learned = (parts(2, "train.remat=unit", rl=rl) for rl in (None, SETTINGS))
    # Beside the units' inputs, some numbers a token for ratios and masks.
    assert scored.activations < learned.activations < scored.activations + STREAM
