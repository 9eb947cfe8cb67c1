"""Where everything lies: the mesh, and one table from names to its axes.

    data      splits rows of the batch; parameters are copied
    fsdp      splits rows of the batch, and the widths of parameters
    expert    splits rows of the batch, the experts, and the widths of the rest
    context   splits the time axis, and all that `expert` splits further
    tensor    splits heads, hidden widths and the vocabulary

Parameters are plain arrays. `PARAMETERS` gives each a logical name for every axis, and
`PLACES` says which mesh axis a logical name is split over; everything else follows.
Code that runs for any mesh calls `constrain`, which does nothing without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax import config
from kimi_jax.canonical import path_name
from kimi_jax.errors import UserError

# Neighbours along the last axis are neighbours on the wire: tensor parallelism talks
# most, data parallelism least.
AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")
TOKENS = (*ROWS, "context")
EXPERTS = ("expert", "context")

# Logical axis -> mesh axes. What is not named here is whole on every device.
PLACES: dict[str, str | tuple[str, ...]] = {
    "rows": ROWS,
    "time": "context",
    "tokens": TOKENS,  # rows and time as one axis
    "width": ("fsdp", *EXPERTS),  # of the residual stream, in parameters only
    "latent": "fsdp",  # that experts read and write, in parameters only
    "heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "experts": EXPERTS,  # tokens differ along both
}

# What only the kept parameters are split over: they are gathered to be used.
GATHERED = ("width", "latent")

Axes = tuple[str | None, ...]
_VECTOR: Axes = (None,)
_TO_HEADS: Axes = ("width", "heads", None)
_PER_HEAD: Axes = (None, "heads", None)

# The logical axes of every parameter by its name, counted from the last: leading axes,
# those of the scans, are never split.
PARAMETERS: dict[str, Axes] = {
    "embed": ("vocab", "width"),
    "unembed": ("width", "vocab"),
    **dict.fromkeys(("q", "k", "v", "g"), _TO_HEADS),
    "o": ("heads", None, "width"),
    "beta": ("width", "heads"),
    **dict.fromkeys(("q_a", "kv_a", "f_a", "g_a"), ("width", None)),
    **dict.fromkeys(("q_b", "kv_b", "f_b", "g_b"), _PER_HEAD),
    "A_log": ("heads",),
    "dt_bias": ("heads", None),
    **dict.fromkeys(("q_conv", "k_conv", "v_conv"), ("heads", None, None)),
    **dict.fromkeys(("gate", "up"), ("width", "hidden")),
    "down": ("hidden", "width"),
    "router": ("width", None),
    "latent_down": ("width", None),
    "latent_up": (None, "width"),
    **dict.fromkeys(("experts_gate", "experts_up"), ("experts", "latent", "hidden")),
    "experts_down": ("experts", "hidden", "latent"),
    **dict.fromkeys(("norm", "o_norm", "latent_norm", "gain", "query"), _VECTOR),
    **dict.fromkeys(("q_a_norm", "kv_a_norm", "bias"), _VECTOR),
    # The vision tower, whose few heads are whole on every device.
    "patch": (None, "width"),
    "position": (None, None, "width"),
    "qkv": ("width", None, None, None),
    "out": (None, None, "width"),
    "project_in": ("width", "hidden"),
    "project_out": ("hidden", "width"),
    **dict.fromkeys(("attention_norm", "mlp_norm"), _VECTOR),
    "weight": (),
}


def make_mesh(cfg: config.Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `cfg.mesh`, over all devices or those given.

    Raises:
      UserError: the axes do not multiply to a number of devices that exist, or do not
        divide what they split. Every problem is listed, with sizes that would do.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = _fill(cfg.mesh, devices)
    problems = list(misfits(cfg, sizes))
    if problems:
        raise UserError("the mesh does not fit:\n  " + "\n  ".join(problems))
    types = (AxisType.Auto,) * len(AXES)
    shape = tuple(sizes[axis] for axis in AXES)
    used = devices[: math.prod(shape)]
    grid = np.array(used).reshape(shape)
    if used[0].platform == "tpu":
        # Axes on neighbouring chips, even where one has to share a side of the torus.
        grid = mesh_utils.create_device_mesh(
            shape, used, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=types)


def _fill(mesh: config.Mesh, devices: Sequence[Any]) -> dict[str, int]:
    """The size of every axis, with -1 replaced by what is left."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    total, kind = len(devices), devices[0].platform
    if not open_axes and fixed <= total:
        return sizes
    if open_axes and total % fixed == 0:
        return sizes | {open_axes[0]: total // fixed}
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    if open_axes:
        fix = f"their product, {fixed}, must divide {total}"
    else:
        fix = f"use --config.mesh.data=-1 for all of them, or axes of at most {total}"
    raise UserError(f"config.mesh: {shown} on {total} {kind} devices; {fix}")


def describe(mesh: Mesh) -> str:
    """ "fsdp=4 x tensor=2"."""
    sizes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    return " x ".join(sizes) or "one device"


def misfits(cfg: config.Config, sizes: dict[str, int]) -> list[str]:
    """What `sizes` of the mesh axes do not divide, each with the nearest that would."""
    found = []
    for what, size, axes in _split_sizes(cfg):
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts == 0:
            continue
        last = max(axes, key=lambda axis: sizes[axis])
        others = parts // sizes[last]
        legal = [n for n in range(1, size + 1) if size % (n * others) == 0]
        near = sorted(legal, key=lambda n: abs(n - sizes[last]))[:2]
        names = " * ".join(f"{a}={sizes[a]}" for a in axes if sizes[a] > 1)
        advice = " or ".join(f"--config.mesh.{last}={n}" for n in sorted(near))
        if not near:
            # The other axes alone do not divide it.
            largest = max(set(axes) - {last}, key=lambda axis: sizes[axis])
            advice = f"a smaller --config.mesh.{largest}"
        found.append(
            f"config.mesh: {names} does not divide {what} = {size}; try {advice}"
        )
    return found


def _split_sizes(cfg: config.Config) -> list[tuple[str, int, tuple[str, ...]]]:
    """(name, size, mesh axes) of every size that a mesh axis splits."""
    model, train = cfg.model, cfg.train
    rows = train.batch_size // train.micro_batches
    sizes = [
        ("train.batch_size / micro_batches", rows, ROWS),
        ("train.seq_len", train.seq_len, ("context",)),
        ("model.width", model.width, ("fsdp", *EXPERTS)),
        ("model.vocab_size", model.vocab_size, ("tensor",)),
    ]
    kinds = set(config.attention_kinds(model))
    for kind, field in (("kda", "num_heads"), ("mla", "num_heads")):
        if kind in kinds:
            heads = getattr(getattr(model, kind), field)
            sizes.append((f"model.{kind}.{field}", heads, ("tensor",)))
    if "gqa" in kinds:
        sizes.append(("model.gqa.num_kv_heads", model.gqa.num_kv_heads, ("tensor",)))
    if "mlp" in config.ffn_kinds(model):
        sizes.append(("model.ffn.width", model.ffn.width, ("tensor",)))
    if "moe" in config.ffn_kinds(model):
        moe = model.moe
        latent = moe.latent_width or model.width
        sizes += [
            ("model.moe.num_experts", moe.num_experts, EXPERTS),
            ("model.moe.expert_width", moe.expert_width, ("tensor",)),
            ("model.moe.latent_width", latent, ("fsdp",)),
        ]
    if model.vision is not None:
        vision = model.vision
        sizes += [
            ("model.vision.width", vision.width, ("fsdp",)),
            ("model.vision.mlp_width", vision.mlp_width, ("tensor",)),
        ]
    return sizes


def spec(*logical: str | None) -> PartitionSpec:
    """Where an array with these logical axes lies."""
    return PartitionSpec(*(None if a is None else PLACES[a] for a in logical))


def parameter_spec(path: Any, leaf: Any, *, in_use: bool = False) -> PartitionSpec:
    """Where a parameter, or an optimizer's array for one, lies.

    Args:
      in_use: as a layer multiplies by it, after it is gathered.

    Raises:
      ValueError: a name that the table lacks.
    """
    names = path_name(path).split("/")
    known = next((name for name in reversed(names) if name in PARAMETERS), None)
    if leaf.ndim == 0 or (known is None and leaf.size <= 1):
        return PartitionSpec()
    if known is None:
        raise ValueError(
            f"parameter {'/'.join(names)!r} has no place; add {names[-1]!r} to "
            "PARAMETERS in kimi_jax/sharding.py"
        )
    axes = PARAMETERS[known]
    if in_use:
        axes = tuple(None if axis in GATHERED else axis for axis in axes)
    return spec(*(None,) * (leaf.ndim - len(axes)), *axes)


def split_axes(places: PartitionSpec) -> set[str]:
    """The mesh axes that an array is split over."""
    names: set[str] = set()
    for axes in places:
        names |= {axes} if isinstance(axes, str) else set(axes or ())
    return names


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """The sharding of every leaf of a training state, or of its shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, parameter_spec(path, leaf)), state
    )


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of [B, T] arrays: rows over devices, time over the context axis."""
    return NamedSharding(mesh, spec("rows", "time"))


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def context_mesh() -> AbstractMesh | None:
    """The mesh that the caller has set by `jax.set_mesh`; None: one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def platform(mesh: AbstractMesh) -> str:
    """ "cpu", "gpu" or "tpu": of the devices that a program is made for."""
    device = mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """`x`, laid out by its logical axes on the mesh that is set, if one is."""
    if context_mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*logical))
