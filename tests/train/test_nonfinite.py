"""A step that is not finite: never applied, explained, then stopped at or skipped."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from kimi_jax import canonical, layout
from kimi_jax.data import loader
from kimi_jax.monitor.metrics import read_metrics
from kimi_jax.train import forensics, loop
from kimi_jax.train.batch import Batch
from kimi_jax.train.first_bad_operation import first_bad_operation
from kimi_jax.train.nonfinite import NonFinite
from kimi_jax.train.step import State, init_state, make_train_step, make_transform
from tests import tiny

SMALL = (
    "model.num_layers=1",
    "model.attention=gqa",
    "model.residual.kind=none",
    "optimizer.kind=adamw",
)
# Two micro-batches; row 2 of the batch is the second row of the first.
CFG = tiny.make("train.micro_batches=2", "model.num_layers=3")


def batch():
    tokens = np.arange(4 * 16, dtype=np.int32).reshape(4, 16)
    ids = np.ones((4, 16), np.int32)
    ids[2, 12:] = 0
    return Batch(
        *map(jnp.asarray, (tokens, tokens + 1, ids)), jnp.asarray(ids, jnp.float32)
    )


def state_with(name, change):
    """A state in which the array of canonical `name` went through `change`."""
    variables = tiny.variables(CFG.model)
    flat = canonical.flatten(CFG.model, variables["params"])
    flat[name] = jnp.asarray(change(np.array(flat[name])))
    params = canonical.unflatten(CFG.model, flat, variables["params"])
    return State(jnp.int32(0), params, variables["balance"], ())


def put(value, *at):
    def change(array):
        array[at] = value
        return array

    return change


def explain(state, groups=None):
    return forensics.explain(CFG, state, batch(), groups or {})


def test_a_bad_row_of_the_embedding_is_named():
    text = explain(state_with("embedding/embed", put(np.nan, 37, 3)))
    assert text.startswith(
        "the forward pass of embedding: the rows of tokens 37 in 'embed'"
    )
    assert "1 tokens are bad, the first in row 2, position 5" in text
    # A row that only padding reads harms nobody, and is not accused.
    text = explain(state_with("embedding/embed", put(np.nan, 45, 3)))
    assert "embedding" not in text


@pytest.mark.parametrize(
    "name",
    [
        "layer_000/attention/kda/dt_bias",
        "layer_001/ffn/moe/experts_up",
        "layer_002/attention/mla/kv_b",
        "output/norm",
    ],
)
def test_a_bad_parameter_is_named_with_its_layer(name):
    place, parameter = name.split("/")[:2], name.split("/")[2:]
    if place[0] == "output":
        place, parameter = ["output"], ["norm"]
    text = explain(state_with(name, put(np.nan, 0)))
    assert text.startswith(f"the forward pass of {'/'.join(place)}: ")
    assert f"not finite are its parameters {'/'.join(parameter)}" in text


def test_an_operation_that_overflows_is_named_with_its_line():
    """Finite queries of 1e38 make infinite products in one line of MLA."""
    name = "layer_002/attention/mla/kv_b"
    text = explain(state_with(name, lambda x: np.full_like(x, 3e38)))
    assert text.startswith("the forward pass of layer_002/attention: first bad is ")
    assert "dot_general at kimi_jax/modules/attend.py:" in text


def test_a_bad_gradient_is_named_where_it_comes_first(monkeypatch):
    """The loss is fine; the gradient of one layer, and of all before it, is not."""

    @jax.custom_vjp
    def poison(x):
        return x

    poison.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))

    def make_loss(cfg):
        def loss(params, balance, batch, totals):
            flat = canonical.flatten(cfg.model, params)
            bad = [poison(x) for k, x in flat.items() if k < "layer_001/ffn/moe/f"]
            return sum(jnp.sum(x) for x in [*flat.values(), *bad]), None

        return loss

    monkeypatch.setattr(forensics, "make_loss", make_loss)
    state = state_with("output/norm", lambda x: x)
    text = explain(state, {"update_rms/kda": np.inf})
    assert text.startswith("the backward pass, where layer_001/ffn comes first: ")
    assert "layer_001/ffn/moe/experts_down" in text and "layer_000" not in text

    monkeypatch.setattr(poison, "defvjp", None, raising=False)
    monkeypatch.setattr(forensics, "_in_gradients", lambda *_: None)
    text = explain(state, {"update_rms/kda": np.inf, "update_rms/mla": 1.0})
    assert text == "the optimizer's update of kda; all gradients are finite"
    assert explain(state).startswith("nothing that can be found again")


def test_masks_are_not_accused():
    def masked(x):
        scores = jnp.where(x > 0, x, -jnp.inf)
        return jax.jit(jax.nn.softmax)(scores)

    assert first_bad_operation(masked, jnp.arange(4.0)) is None
    found = first_bad_operation(lambda x: jnp.log(x - 5.0) + 1.0, jnp.arange(4.0))
    assert found == "log"


def test_the_order_of_parts_is_that_of_the_model():
    variables = tiny.variables(CFG.model)
    parts = [part.name for part, _ in forensics._forward(CFG.model, variables, batch())]
    places = [place.name for place in layout.places(layout.plan(CFG.model))]
    assert parts == ["embedding", *places, "output"]


@pytest.mark.slow
def test_what_a_bad_step_leaves_behind():
    """ "skip" moves the step and the rate's clock; `go` = False moves nothing."""
    cfg = tiny.make(*SMALL, "train.on_nonfinite=skip")
    transform = make_transform(cfg)
    step = jax.jit(make_train_step(cfg, transform))
    start = jax.jit(lambda: init_state(cfg, transform))()
    good = batch()
    bad = good._replace(weights_BT=good.weights_BT.at[0, 0].set(jnp.nan))

    def clock(state):
        is_clock = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
        leaves = jax.tree.leaves(state.optimizer, is_leaf=is_clock)
        return [int(x.count) for x in leaves if is_clock(x)]

    def moved(old, new):
        flat_old, flat_new = (
            jax.tree_util.tree_leaves_with_path(s) for s in (old, new)
        )
        return [
            jax.tree_util.keystr(path)
            for (path, a), (_, b) in zip(flat_old, flat_new, strict=True)
            if not np.array_equal(a, b)
        ]

    held, metrics = step(start, good, False)
    assert bool(metrics["finite"]) and not moved(start, held)
    after, metrics = step(start, bad, True)
    assert not bool(metrics["finite"])
    assert len(moved(start, after)) == 2
    assert int(after.step) == 1 and clock(after) == [1]
    applied, metrics = step(after, good, True)
    assert bool(metrics["finite"]) and clock(applied) == [2]
    stop = tiny.make(*SMALL)
    untouched, _ = jax.jit(make_train_step(stop, transform))(start, bad, True)
    assert not moved(start, untouched)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(steps whose batches are bad, overrides) -> workdir; trains eight steps."""
    text = tmp_path / "text.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc \n"), 40)) for _ in range(80)]
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    iterate = loader.iterate

    def start(bad, *overrides, name="run"):
        def spoiled(source, first, last, **kwargs):
            batches = iterate(source, first, last, **kwargs)
            for step, host in enumerate(batches, first + 1):
                if isinstance(source, loader.Reader) and step in bad:
                    host = host | {"weights": host["weights"] * np.float32(np.nan)}
                yield host

        monkeypatch.setattr(loader, "iterate", spoiled)
        cfg = tiny.make(
            f"data.sources={text}",
            *SMALL,
            "train.steps=8",
            "train.log_every=3",
            "train.checkpoint_every=3",
            "train.eval_every=8",
            *overrides,
        )
        with open(os.devnull, "w") as quiet:
            loop.train(cfg, str(tmp_path / name), console=Console(file=quiet))
        return tmp_path / name

    return start


def alerts(workdir):
    records = read_metrics(workdir / "metrics.jsonl")
    return [r for r in records if r.get("name") == "nonfinite"]


@pytest.mark.slow
def test_stop_then_skip_from_the_checkpoint(run, tmp_path):
    """Step 5 is bad: the run stops, and goes on past it when told to skip."""
    with pytest.raises(NonFinite, match=r"step 5 is not finite.*was not applied") as e:
        run({5})
    assert "It began in the loss, nan." in str(e.value)
    workdir = tmp_path / "run"
    saved = np.load(workdir / "nonfinite" / "step_00000005.npz")
    assert int(saved["step"]) == 5 and np.isnan(saved["weights"]).any()
    assert saved["tokens"].shape == (4, 32)
    assert [a["step"] for a in alerts(workdir)] == [5]

    run({5}, "train.on_nonfinite=skip")
    records = read_metrics(workdir / "metrics.jsonl")
    train = {r["step"]: r for r in records if r["kind"] == "train"}
    assert {s: r["skipped"] for s, r in train.items()} == {3: 0, 6: 1, 8: 0}
    assert all(np.isfinite(r["loss"]) for r in train.values())
    assert [a["step"] for a in alerts(workdir)] == [5]
    # The same run without an interruption ends in the same numbers.
    whole = run({5}, "train.on_nonfinite=skip", name="whole")
    again = {
        r["step"]: r
        for r in read_metrics(whole / "metrics.jsonl")
        if r["kind"] == "train"
    }
    assert {s: r["loss"] for s, r in again.items()} == {
        s: r["loss"] for s, r in train.items()
    }


@pytest.mark.slow
def test_too_many_skips_in_a_row_stop_the_run(run, tmp_path):
    skip = ("train.on_nonfinite=skip", "train.max_skips=2")
    run({2, 4, 5, 7}, *skip, name="apart")
    assert [a["step"] for a in alerts(tmp_path / "apart")] == [2, 4, 5, 7]
    with pytest.raises(NonFinite, match=r"3 steps in a row, more than .*max_skips=2"):
        run({2, 3, 4}, *skip)
    # Steps 2 and 3 are in the checkpoint of step 3, and still count after a resume.
    with pytest.raises(NonFinite, match="3 steps in a row"):
        run({2, 3, 4}, *skip)
