"""Images train jointly with text, on a mesh, and the model learns to read them."""

import runpy

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax import canonical, config_io, sharding
from kimi_jax.data import loader
from kimi_jax.train.batch import Batch, batch_shape, by_name, on_mesh
from kimi_jax.train.evaluate import make_eval_step
from kimi_jax.train.forensics import explain
from kimi_jax.train.step import State, init_state, make_train_step, make_transform
from tests import tiny
from tests.modules.vision_cases import GRIDS, P, draw, make


def host_batch(seed: int, rows: int = 8, length: int = 32) -> loader.Batch:
    """Rows of text with the placeholders of two items; one row shows nothing."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length + 1)).astype(np.int32)
    patches, grids = (
        np.zeros((rows, P, 12), np.float32),
        np.zeros((rows, 3, 3), np.int32),
    )
    for row in range(rows - 1):
        tokens[row, [3, 4, 9, 10]] = 259
        patches[row, :32], grids[row, :2] = draw(seed + row), GRIDS
    targets = tokens[:, 1:]
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "segment_ids": np.ones((rows, length), np.int32),
        "weights": (targets != 259).astype(np.float32),
        "patches": patches,
        "grids": grids,
    }


def step_on(sizes: dict[str, int], *overrides: str):
    """(parameters by name, loss) after a step on a mesh of these sizes."""
    mesh_values = (f"mesh.{axis}={size}" for axis, size in sizes.items())
    cfg = make("model.dtype=float64", "train.batch_size=8", *mesh_values, *overrides)
    mesh, transform = sharding.make_mesh(cfg), optax.sgd(0.1)
    params = tiny.variables(cfg.model)["params"]
    state = State(jnp.int32(0), params, {}, transform.init(params))
    placed = sharding.state_shardings(mesh, state)
    step = jax.jit(make_train_step(cfg, transform), out_shardings=(placed, None))
    with jax.set_mesh(mesh):
        batch = on_mesh(host_batch(0), sharding.batch_sharding(mesh))
        state, metrics = step(jax.device_put(state, placed), batch)
    return canonical.flatten(cfg.model, state.params), float(metrics["loss"])


@pytest.mark.slow
def test_a_mesh_takes_the_same_step():
    sizes = {"fsdp": 2, "context": 2, "tensor": 2}
    with jax.enable_x64(True):
        want, loss = step_on({}, "train.micro_batches=2")
        got, other_loss = step_on(sizes, "train.remat=block")
        assert other_loss == pytest.approx(loss, rel=1e-12)
        # The tower's tables and norms are float32, whatever the model computes in.
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


def test_batches_have_the_shape_that_steps_are_compiled_for():
    cfg = make("train.batch_size=8", "mesh.data=2", "mesh.context=4")
    rows = sharding.batch_sharding(sharding.make_mesh(cfg))
    host = host_batch(0)
    batch, shapes = on_mesh(host, rows), batch_shape(cfg.train, rows, cfg.model.vision)
    chex.assert_trees_all_equal_shapes_and_dtypes(batch, shapes)
    for array, shape in zip(
        jax.tree.leaves(batch), jax.tree.leaves(shapes), strict=True
    ):
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
    chex.assert_trees_all_equal(by_name(batch), host)


def test_text_batches_are_what_they_were():
    cfg = make("train.row_patches=0", "train.row_items=0")
    rows = sharding.batch_sharding(sharding.make_mesh(cfg))
    assert batch_shape(cfg.train, rows, cfg.model.vision).media is None
    assert len(jax.tree.leaves(batch_shape(cfg.train, rows))) == 4


@pytest.mark.slow
def test_a_bad_tower_is_named():
    cfg = make("train.batch_size=8")
    params = tiny.variables(cfg.model)["params"]
    embedding = params["vision"]["embedding"]
    bad = {**embedding, "patch": embedding["patch"].at[0, 0].set(jnp.nan)}
    params = {**params, "vision": {**params["vision"], "embedding": bad}}
    rows = sharding.batch_sharding(sharding.make_mesh(cfg))
    state = State(jnp.int32(0), params, {}, ())
    said = explain(cfg, state, on_mesh(host_batch(0), rows), {})
    assert said.startswith("the forward pass of vision: not finite are its parameters")
    assert "embedding/patch" in said


@pytest.mark.slow
def test_a_small_model_learns_to_read(tmp_path):
    """After 100 steps the right picture tells what is written, another one misleads."""
    values = runpy.run_path("configs/vision_words.py")["get_config"]()
    small = (
        "train.batch_size=8",
        "train.steps=100",
        "data.sources=words:4096",
        "model.attention=gqa",
        "model.num_layers=1",
        "model.ffn.num_dense_layers=1",
        "model.vision.num_layers=1",
    )
    cfg = config_io.from_dict(values, small)
    data, transform = loader.load_data(cfg, tmp_path), make_transform(cfg)
    state = jax.jit(lambda: init_state(cfg, transform))()
    step = jax.jit(make_train_step(cfg, transform), donate_argnums=0)
    evaluate = jax.jit(make_eval_step(cfg, (64,), data.tokenizer.bytes_per_token))
    held_out = place(data.validation[0])
    other = held_out.media.patches_BPC[::-1]
    shuffled = held_out._replace(media=held_out.media._replace(patches_BPC=other))

    def loss(batch: Batch) -> float:
        sums = evaluate(state, batch)
        return float(sums["nats"][0] / sums["tokens"][0])

    before = loss(held_out)
    for number in range(cfg.train.steps):
        state, _ = step(state, place(data.train[number]))
    after, misled = loss(held_out), loss(shuffled)
    # Knowing only how numbers are made is worth 1.9 nats a token.
    assert before > 5.0
    assert after < 1.7
    assert misled > after + 0.5


def place(host: loader.Batch) -> Batch:
    cfg = make()
    return on_mesh(host, sharding.batch_sharding(sharding.make_mesh(cfg)))
