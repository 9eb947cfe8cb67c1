"""What crosses the wire, read off compiled layers and the compiled optimizer.

Simulated devices tell nothing about seconds, and everything about bytes. `bytes` below
are whole buffers: what one device takes part in, its own share included.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from kimi_jax import canonical, sharding
from kimi_jax.hlo import collective_bytes
from kimi_jax.modules import transformer
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.modules.mla import MultiHeadLatentAttention
from kimi_jax.modules.mlp import MLP
from kimi_jax.modules.moe import LatentMoE
from kimi_jax.train import optimizer
from tests import tiny

FLOAT = 4  # the CPU backend widens bfloat16 collectives, so all is float32 here


def placed(mesh, tree):
    """Shapes of `tree`, where the table puts them."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        sharding.state_shardings(mesh, tree),
    )


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def update_text(names: tuple[str, ...], *overrides: str) -> str:
    """HLO of the optimizer's update of the parameters with these names."""
    cfg = tiny.make(*overrides)
    mesh = sharding.make_mesh(cfg)
    fresh = jax.eval_shape(lambda: transformer.init(cfg.model, jax.random.key(0)))
    flat = traverse_util.flatten_dict(fresh["params"])
    params = {path: leaf for path, leaf in flat.items() if path[-1] in names}
    assert {path[-1] for path in params} == set(names)
    params = traverse_util.unflatten_dict(params)
    transform = optimizer.make(cfg.optimizer, 10, params)
    state = placed(mesh, jax.eval_shape(transform.init, params))
    params = placed(mesh, params)
    out = shardings((params, state))
    with jax.set_mesh(mesh):
        update = jax.jit(transform.update, out_shardings=out)
        return update.lower(params, state, params).compile().as_text()


HEADS = ("q", "k", "v", "q_b", "kv_b")
EXPERTS = ("experts_gate", "experts_up", "experts_down")


@pytest.mark.parametrize(
    ("names", "mesh"),
    [
        (HEADS, ("mesh.tensor=2",)),
        (EXPERTS, ("mesh.expert=4",)),
        (EXPERTS, ("mesh.expert=2", "mesh.context=2")),
    ],
    ids=["heads", "experts", "experts-context"],
)
def test_muon_orthogonalises_on_the_device_that_holds_the_matrix(names, mesh):
    """The one collective is that of the global norm: a number for each parameter."""
    text = update_text(names, "model.num_layers=3", *mesh)
    assert list(collective_bytes(text)) == ["all-reduce"]
    results = re.findall(r"= (.*?) all-reduce\(", text)
    shapes = re.findall(r"\w+\[[\d,]*\]", " ".join(results))
    assert shapes and set(shapes) == {"f32[]"}


@pytest.mark.parametrize(
    ("names", "overrides"),
    [
        (("gate", "down"), ("mesh.fsdp=4",)),
        (("gate", "down"), ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2")),
        (EXPERTS, ("mesh.fsdp=2", "mesh.tensor=2")),
        (("q", "k"), ("mesh.tensor=2", "optimizer.muon_per_head=false")),
    ],
    ids=["fsdp", "mixed", "experts", "joined-heads"],
)
def test_muon_sends_split_matrices_once_there_and_once_back(names, overrides):
    """And nothing in the loop: `runs` counts a loop as often as it runs.

    Matrices of one shape and place go together: b of them, made a multiple of the
    devices that they are split over.
    """
    overrides = ("model.num_layers=3", *overrides)
    found = collective_bytes(update_text(names, *overrides))
    sent, runs = 0, 0
    sizes = sharding.make_mesh(tiny.make(*overrides)).shape
    for (m, n, *places), count in matrices_alike(names, *overrides).items():
        over_m, over_n = (
            math.prod(sizes[axis] for axis in sharding.split_axes(P(place)))
            for place in places
        )
        for over, size in ((over_m, m * n // over_n), (over_n, m * n)):
            if over > 1:
                count = -(-count // over)  # whole along this side, after the exchange
                sent, runs = sent + 2 * count * size * FLOAT, runs + 2
    assert found["all-to-all"].bytes == sent
    assert found["all-to-all"].runs == runs
    assert set(found) == {"all-to-all", "all-reduce"}  # of the norm, tested above


def matrices_alike(names: tuple[str, ...], *overrides: str) -> dict[tuple, int]:
    """{(m, n, what splits m, what splits n): how many matrices}."""
    cfg = tiny.make(*overrides)
    fresh = jax.eval_shape(lambda: transformer.init(cfg.model, jax.random.key(0)))
    found: dict[tuple, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(fresh["params"]):
        name = canonical.path_name(path).rsplit("/", 1)[-1]
        if name not in names:
            continue
        batch = leaf.ndim - (3 if name in ("q", "k") else 2)  # heads joined
        m, *n = leaf.shape[batch:]
        places = sharding.parameter_spec(path, leaf)[batch : batch + 2]
        key = (m, math.prod(n), *places)
        found[key] = found.get(key, 0) + math.prod(leaf.shape[:batch])
    return found


def layer_traffic(make, *overrides: str, gradient: bool):
    """(collectives, parameters, config) of one layer of the tiny model on a mesh."""
    cfg = tiny.make(*overrides)
    mesh = sharding.make_mesh(cfg)
    layer = make(cfg.model)
    B, T, D = cfg.train.batch_size, cfg.train.seq_len, cfg.model.width
    time = jax.NamedSharding(mesh, sharding.spec("rows", "time", None))
    x_BTD = jax.ShapeDtypeStruct((B, T, D), jnp.float32, sharding=time)
    ids_BT = jax.ShapeDtypeStruct(
        (B, T), jnp.int32, sharding=sharding.batch_sharding(mesh)
    )
    fresh = jax.eval_shape(
        lambda: layer.init(jax.random.key(0), jnp.zeros((B, T, D)), None)
    )
    params = placed(mesh, fresh["params"])
    rest = placed(mesh, {"balance": fresh.get("balance", {})})

    def forward(params, x_BTD, rest, ids_BT):
        return layer.apply({"params": params, **rest}, x_BTD, ids_BT)

    def both(params, x_BTD, rest, ids_BT):
        y_BTD, vjp = jax.vjp(lambda p, x: forward(p, x, rest, ids_BT), params, x_BTD)
        return y_BTD, vjp(y_BTD)

    function, out = forward, time
    if gradient:
        function, out = both, (time, (shardings(params), time))
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, out_shardings=out).lower(
            params, x_BTD, rest, ids_BT
        )
    return collective_bytes(lowered.compile().as_text()), params, cfg


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "both"])
def test_experts_get_tokens_at_the_latent_width(gradient):
    found, params, cfg = layer_traffic(
        LatentMoE, "mesh.expert=4", "model.moe.capacity_factor=1.5", gradient=gradient
    )
    moe, tokens = cfg.model.moe, cfg.train.batch_size * cfg.train.seq_len // 4
    assert moe.latent_width < cfg.model.width
    slots = tokens * moe.num_active * moe.capacity_factor
    there_and_back = 2 * slots * moe.latent_width * FLOAT
    passes = 2 if gradient else 1
    # With each slot goes the number of its expert, once.
    assert found["all-to-all"].bytes == passes * there_and_back + slots * 4
    assert found["all-to-all"].runs == 2 * passes + 1
    assert found["all-to-all"].exact
    assert set(found) == {"all-to-all", "all-reduce", "all-gather"}
    assert found["all-gather"].bytes == FLOAT * sum(split(params).values())
    if not gradient:
        # Of partial sums over the tensor axis, which is one device here.
        assert found["all-reduce"].sent_bytes == 0


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "both"])
def test_kda_tells_later_devices_a_summary_of_its_piece(gradient):
    found, params, cfg = layer_traffic(
        KimiDeltaAttention, "mesh.context=4", gradient=gradient
    )
    kda, rows, ranks = cfg.model.kda, cfg.train.batch_size, 4
    H, K, V, reach = kda.num_heads, kda.key_dim, kda.value_dim, kda.conv_width - 1
    # 128 KiB a head and rank at K = V = 128, for each row.
    summaries = ranks * rows * H * K * (K + V) * FLOAT
    two_ids = ranks * rows * 2 * 4
    halo, id_halo = rows * reach * H * (2 * K + V) * FLOAT, rows * reach * 4
    passes = 2 if gradient else 1
    assert found["all-gather"].bytes == summaries + two_ids + FLOAT * sum(
        split(params).values()
    )
    assert found["collective-permute"].bytes == passes * halo + id_halo
    if not gradient:
        assert set(found) == {"all-gather", "collective-permute"}
        return
    assert found["reduce-scatter"].bytes == summaries
    # Gradients of the parameters, each once.
    assert found["all-reduce"].bytes == FLOAT * sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )


def split(params, kept="experts_"):
    """{name: size} of the parameters that are gathered to be used."""
    return {
        canonical.path_name(path): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if math.prod(leaf.sharding.shard_shape(leaf.shape)) < leaf.size
        and kept not in canonical.path_name(path)
    }


def mlp(model):
    return MLP(model, 32)


LAYERS = {
    "kda": KimiDeltaAttention,
    "mla": MultiHeadLatentAttention,
    "moe": LatentMoE,
    "mlp": mlp,
}


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_gathered_once(name):
    """For forward and backward together: within a layer nothing is computed again."""
    found, params, _ = layer_traffic(LAYERS[name], "mesh.fsdp=4", gradient=True)
    sizes = split(params, kept="nothing")  # fsdp splits experts too
    assert found["all-gather"].bytes == FLOAT * sum(sizes.values())
    assert found["all-gather"].runs == len(sizes)
    assert set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}
