"""Is it right on several devices? Whole steps on every mesh, and experts elsewhere."""

import math
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from configs import common
from experiments.multi_gpu_turns import Turns
from kimi_jax import canonical, config_io, distributed, sharding
from kimi_jax.config import Config
from kimi_jax.errors import UserError
from kimi_jax.modules import transformer
from kimi_jax.ops.activations import situ
from kimi_jax.ops.dispatch import Options, dispatch
from kimi_jax.train.batch import Batch
from kimi_jax.train.step import State, make_train_step

STEPS = 3
DTYPES = ("float32", "bfloat16")
# Of float32, in norms relative to one device; bfloat16 may differ by what it differs
# from float32 on one device.
LARGEST_ERROR = 1e-3
# Of router biases: rounding moves a few scores into the next bin of a histogram.
LARGEST_BIAS_ERROR = 2e-3


def fetch(tree: Any) -> Any:
    """The numbers, wherever they lie; float32 for bfloat16. All processes call it."""

    def one(x: jax.Array) -> np.ndarray:
        host = distributed.whole(x)
        return host.astype(np.float32) if host.dtype == jnp.bfloat16 else host

    return jax.tree.map(one, tree)


def errors(got: Any, expected: Any) -> Any:
    """Norms of the differences, relative to the norms."""

    def one(a: np.ndarray, b: np.ndarray) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return jax.tree.map(one, got, expected)


def largest_error(got: Any, expected: Any) -> float:
    """NaN if any is; `max` would lose it."""
    return float(np.max(jax.tree.leaves(errors(got, expected))))


def sizes_of(text: str) -> dict[str, int]:
    """ "fsdp=2,context=-1" as a dict; -1 takes the devices that are left."""
    return {name: int(size) for name, size in (x.split("=") for x in text.split(","))}


def too_small(text: str, count: int) -> str | None:
    """Why `count` devices cannot form the mesh with every axis split, or None."""
    sizes = sizes_of(text).values()
    fixed = math.prod(size for size in sizes if size != -1)
    needed = fixed * 2 if -1 in sizes else fixed
    return None if count >= needed else f"not run: needs {needed} devices"


def meshes(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """Steps on each mesh, from the states that one device went through.

    Not from their own: a router bias that rounding moved by 1e-4 in one step sends
    tokens elsewhere in the next.
    """
    del turns  # nothing is timed
    texts = {text: too_small(text, jax.device_count()) for text in config.meshes}
    # Several processes must compile in one order.
    workers = 1 if jax.process_count() > 1 else 16
    with futures.ThreadPoolExecutor(workers) as pool:
        runs = {
            (dtype, text): begin(
                [*config.check_model, f"model.dtype={dtype}"], text, pool
            )
            for dtype in DTYPES
            for text in ("data=1", *(text for text, why in texts.items() if not why))
        }
    rows: list[dict] = []
    for dtype in DTYPES:
        states, alone = take_steps(*runs[dtype, "data=1"])
        exact = take_steps(*runs["float32", "data=1"], states)[1]
        for text, why in texts.items():
            row = {"case": f"{STEPS} steps, {text}", "implementation": dtype}
            if why is None:
                row |= compare(take_steps(*runs[dtype, text], states)[1], alone, exact)
            rows.append(row | ({} if why is None else {"note": why}))
            yield rows[-1]
    judge(rows)


def compare(got: list[dict], alone: list[dict], exact: list[dict]) -> dict:
    """Errors of a mesh, and the most that rounding explains."""

    def worst(a: list[dict], b: list[dict], what: str) -> tuple[float, str]:
        found = [errors(x[what], y[what]) for x, y in zip(a, b, strict=True)]
        pairs = [(error, name) for one in found for name, error in one.items()]
        return max(pairs, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf))

    def moved(a: list[dict], b: list[dict]) -> float:
        each = [
            np.abs(x["bias"][name] - bias).max()
            for x, y in zip(a, b, strict=True)
            for name, bias in y["bias"].items()
        ]
        return float(np.max(each))

    gradient, name = worst(got, alone, "gradients")
    return {
        "error": gradient,
        "limit": worst(alone, exact, "gradients")[0] + LARGEST_ERROR,
        "of": name,
        "loss error": worst(got, alone, "loss")[0],
        "bias error": moved(got, alone),
        "bias limit": moved(alone, exact) + LARGEST_BIAS_ERROR,
    }


def judge(rows: list[dict]) -> None:
    """Raises UserError if any row has an error that is not below its limit."""
    pairs = [("error", "limit"), ("loss error", "limit"), ("bias error", "bias limit")]
    pairs.append(("sums error", "sums limit"))
    wrong = [
        str(row)
        for row in rows
        if any(name in row and not row[name] < row[most] for name, most in pairs)
    ]
    if wrong:
        raise UserError("several devices differ from one:\n  " + "\n  ".join(wrong))


def on_mesh(fields: Sequence[str], text: str) -> tuple[Config, Mesh]:
    """The config of these fields on a mesh, as `sizes_of` has it, and that mesh.

    A mesh of one device is one of this process.
    """
    sizes = sizes_of(text)
    mesh = [f"mesh.{name}={size}" for name, size in sizes.items()]
    cfg = config_io.from_dict(common.base(), [*fields, *mesh])
    one = all(size == 1 for size in sizes.values())
    return cfg, sharding.make_mesh(cfg, jax.local_devices()[:1] if one else None)


def begin(
    fields: Sequence[str], text: str, pool: futures.Executor
) -> tuple[Config, Mesh, Any]:
    """(config, mesh, the step being compiled)."""
    cfg, mesh = on_mesh(fields, text)
    transform = optax.sgd(0.05, momentum=0.0)  # keeps the gradient
    shapes = first_state(cfg)
    placed = sharding.state_shardings(mesh, shapes)
    step = jax.jit(make_train_step(cfg, transform), out_shardings=(placed, None))
    given = place(shapes, mesh), place_batch(cfg, mesh, 0)
    # Else float32 products have 10 bits, and differ with the shape of a device's part.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return cfg, mesh, pool.submit(step.lower(*given).compile)


def first_state(cfg: Config) -> State:
    params, balance = variables(cfg)
    shapes = jax.eval_shape(optax.sgd(0.05, momentum=0.0).init, params)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    step: Any = np.zeros((), np.int32)
    return State(step, params, balance, zeros)


def place(state: State, mesh: Mesh) -> Any:
    return jax.device_put(state, sharding.state_shardings(mesh, state))


def place_batch(cfg: Config, mesh: Mesh, seed: int) -> Any:
    return jax.device_put(draw_batch(cfg, seed), sharding.batch_sharding(mesh))


def take_steps(
    cfg: Config, mesh: Mesh, job: futures.Future, states: list[State] | None = None
) -> tuple[list[State], list[dict]]:
    """Each step's state before it, and its loss, gradients and router biases after.

    Args:
      states: to start each step from; None: one after the other.
    """
    before, after, step = [states[0] if states else first_state(cfg)], [], job.result()
    for seed in range(STEPS):
        if states is not None:
            before[seed:] = [states[seed]]
        state, metrics = step(place(before[-1], mesh), place_batch(cfg, mesh, seed))
        gradients = {"params": state.optimizer[0].trace}
        bias = jax.tree_util.tree_leaves_with_path(state.balance)
        found = {
            "loss": {"loss": metrics["loss"]},
            "gradients": canonical.flatten(cfg.model, gradients),
            "bias": {canonical.path_name(path): x for path, x in bias},
        }
        after.append(fetch(found))
        before.append(fetch(state))
    return before[:STEPS], after


def variables(cfg: Config) -> tuple[Any, Any]:
    """Parameters and router biases by numpy: compiling a draw takes longer."""
    shapes = jax.eval_shape(lambda: transformer.init(cfg.model, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        name = canonical.path_name(path).rsplit("/", 1)[-1]
        centre = 1.0 if "norm" in name or name == "gain" else 0.0
        return (centre + 0.08 * rng.normal(size=leaf.shape)).astype(np.float32)

    made = jax.tree_util.tree_map_with_path(draw, shapes)
    return made["params"], made["balance"]


def draw_batch(cfg: Config, seed: int) -> Batch:
    """Rows of several documents, some across device borders, with padding."""
    rng, shape = np.random.default_rng(seed), (cfg.train.batch_size, cfg.train.seq_len)
    B, T = shape
    tokens = rng.integers(0, cfg.model.vocab_size, (B, T + 1)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, shape), axis=1).astype(np.int32)
    ids[0, T // 3 :] = 0
    weights = ((ids > 0) * rng.integers(0, 2, shape)).astype(np.float32)
    fields: Any = tokens[:, :-1], tokens[:, 1:], ids, weights
    return Batch(*fields)


def dispatches(config: ConfigDict, turns: Turns) -> Iterator[dict]:
    """Experts of other devices against all of them on one, over several routings.

    Tokens that go nowhere hold NaN, which must reach nothing, and one routing sends
    nothing to the last device.
    """
    del turns  # nothing is timed
    rows: list[dict] = []
    for experts in config.dispatch_experts:
        for dtype, limit in (("float32", 1e-4), ("bfloat16", 2e-2)):
            inputs = [dispatch_inputs(experts, dtype, i, config) for i in range(4)]
            one = dispatch_program(1, "local", config)
            expected = [fetch(one(*x)) for x in inputs]
            for method in ("capacity", "ragged"):
                many = dispatch_program(jax.device_count(), method, config)
                found = []
                for x, want in zip(inputs, expected, strict=True):
                    *got, dropped = fetch(many(*x))
                    assert not dropped.any(), (method, dropped)  # there is room
                    found.append(largest_error(tuple(got), tuple(want[:-1])))
                row: dict[str, Any] = {
                    "case": f"{experts} experts, {method}",
                    "implementation": dtype,
                    "error": float(np.max(found)),
                    "limit": limit,
                }
                rows.append(row)
                yield row
    judge(rows)


def dispatch_inputs(experts: int, dtype: str, seed: int, config: ConfigDict) -> tuple:
    """w, x, weights, chosen experts and dy for all devices."""
    rng, A = np.random.default_rng(seed), min(config.active, experts // 4)
    N, L, F = config.dispatch_tokens, config.dispatch_width, config.dispatch_width // 2
    shapes = (experts, L, F), (experts, L, F), (experts, F, L)
    w = tuple((rng.normal(size=s) / L**0.5).astype(dtype) for s in shapes)
    x, dy = (rng.normal(size=(N, L)).astype(dtype) for _ in "xy")
    scores = rng.normal(size=(N, experts)) + rng.normal(size=experts)
    if seed == 1:
        scores[:, experts // jax.device_count() * (jax.device_count() - 1) :] = -np.inf
    chosen = np.argsort(-scores, axis=1)[:, :A].astype(np.int32)
    weights = rng.uniform(size=(N, A)).astype(np.float32)
    nowhere = rng.uniform(size=N) < 0.1
    chosen[nowhere], x[nowhere] = experts, np.nan
    return w, x, weights, chosen, dy


def dispatch_program(count: int, method: str, config: ConfigDict) -> Any:
    """(w, x, weights, chosen, dy) -> y, gradients by w, x and weights, dropped."""
    devices = jax.local_devices()[:1] if count == 1 else jax.devices()
    mesh = Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,))
    axis = None if count == 1 else "expert"
    # Room for whatever is sent, even all of it to one device.
    options = Options(
        method, axis, capacity_factor=float(count), implementation="blocked"
    )

    def both(w, x, weights, chosen, dy):
        def forward(w, x, weights):
            activation = partial(situ, beta=4.0, linear_beta=25.0)
            gate, up, down = w
            args = x, chosen, weights, gate, up, down
            made = dispatch(*args, activation, options)
            return made.y_NL, made.dropped[None]

        y, pull, dropped = jax.vjp(forward, w, x, weights, has_aux=True)
        return y, *pull(dy), dropped

    split = P("expert")
    over = both
    if count > 1:
        over = jax.shard_map(
            both, mesh=mesh, in_specs=(split,) * 5, out_specs=(split,) * 5
        )
    place = NamedSharding(mesh, split)
    run = jax.jit(over)

    def call(*inputs):
        with jax.default_matmul_precision("highest"):
            return run(*jax.device_put(inputs, place))

    return call
