"""The tables that a run prints before its first step."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
from rich.console import Console

from kimi_jax import accounting, config, flops, hardware, layout, sharding
from kimi_jax.data import loader, statistics
from kimi_jax.errors import UserError
from kimi_jax.modules.moe import choose as choose_experts
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.monitor.tensorboard import tensorboard_available
from pallas_kernels.kda import choose_implementation


def show(
    console: Console,
    cfg: config.Config,
    mesh: jax.sharding.Mesh,
    data: loader.Data,
    folder: pathlib.Path,
    first: int,
) -> None:
    """Parameters by part, data, mesh, kernels and why, fresh or resumed, outputs.

    Below them, what should be looked at before the run takes hours.
    """
    print_first_screen(
        console,
        [
            ("parameters", parameter_rows(cfg.model)),
            ("data", data_rows(data)),
            *_parts(data),
            ("run", run_rows(cfg, mesh, folder, first)),
        ],
    )
    for line in statistics.warnings(data.statistics, cfg.train.seq_len):
        console.print(f"warning: {line}", markup=False, highlight=False)


def data_rows(data: loader.Data) -> list[tuple[str, Any]]:
    """What a run reads; several sources are counted, as the next table names them."""
    summary = {k.replace("_", " "): v for k, v in data.summary.items()}
    sources = {cell.source for cell in data.statistics}
    if len(sources) > 1:
        summary["source"] = f"{len(sources)}, see below"
    return list(summary.items())


def _parts(data: loader.Data) -> list[tuple[str, list]]:
    """Tables of the cells; generated tasks have none."""
    if not data.statistics:
        return []
    return [
        ("parts of the text", statistics.summary_rows(data.statistics)),
        ("lengths of documents", statistics.length_rows(data.statistics)),
    ]


def parameter_rows(model: config.Model) -> list[tuple[str | int, ...]]:
    """A row for each part of the model, and the totals."""
    parts = accounting.parameter_parts(model)
    rows: list[tuple[str | int, ...]] = [("part", "total", "active a token")]
    rows += [(part.name, part.total, part.active) for part in parts]
    total = sum(part.total for part in parts)
    active = sum(part.active for part in parts)
    return [*rows, ("all", total, active)]


def layer_row(model: config.Model) -> str:
    """ "8 layers: 6 kda, 2 mla; 1 mlp, 7 moe"."""
    kinds = layout.sublayer_kinds(model)
    count = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return f"{model.num_layers} layers: " + ", ".join(
        f"{n} {kind}" for kind, n in count.items()
    )


def kda_kernel(cfg: config.Config, mesh: jax.sharding.Mesh) -> tuple[str, str]:
    """What computes KDA on the mesh, and why.

    Raises:
      UserError: the config asks for what cannot run there.
    """
    platform = mesh.devices.flat[0].platform
    try:
        return choose_implementation(cfg.model.kda.implementation, platform)
    except ValueError as error:
        raise UserError(f"config.model.kda.implementation: {error}") from None


def flops_row(cfg: config.Config, device_kind: str) -> str:
    """ "2.4e+12 a step; at most 9.895e+14 a second on each NVIDIA H200"."""
    step, peak = flops.step_flops(cfg), hardware.peak_flops(device_kind)
    if peak is None:
        return f"{step:.3g} a step; no peak is known for {device_kind}, so no MFU"
    return f"{step:.3g} a step; at most {peak:.4g} a second on each {device_kind}"


def flops_rows(model: config.Model, seq_len: int) -> list[tuple[str, str, str, str]]:
    """A row for each part of the model, and the totals."""
    parts = flops.flop_parts(model, seq_len)
    total = sum(part.training for part in parts)
    rows = [("part", "forward a token", "training a token", "share")]
    rows += [
        (p.name, f"{p.forward:.4g}", f"{p.training:.4g}", f"{p.training / total:.1%}")
        for p in parts
    ]
    return [*rows, ("all", f"{total / flops.TRAINING:.4g}", f"{total:.4g}", "100.0%")]


def expert_rows(cfg: config.Config, mesh: jax.sharding.Mesh) -> list[tuple[str, str]]:
    """What multiplies the experts, and why; how tokens are routed and travel."""
    moe, train = cfg.model.moe, cfg.train
    if "moe" not in config.ffn_kinds(cfg.model):
        return []
    tokens = train.batch_size // train.micro_batches * train.seq_len
    with jax.set_mesh(mesh):
        name, why = choose_experts(moe, tokens)
    sent = ""
    if math.prod(mesh.shape[axis] for axis in sharding.EXPERTS) > 1:
        sent = f"; sent by {moe.dispatch}, with room for {moe.capacity_factor:g} times "
        sent += "an even load"
    return [
        ("experts", f"{name}: {why}"),
        ("routing", f"balanced by {moe.balancing.method}{sent}"),
    ]


def run_rows(
    cfg: config.Config, mesh: jax.sharding.Mesh, folder: pathlib.Path, first: int
) -> list[tuple[str, str]]:
    """Model, mesh, kernels and why, work, where it starts, and where results go."""
    train, device = cfg.train, mesh.devices.flat[0]
    kernel, why = kda_kernel(cfg, mesh)
    tokens = train.steps * train.batch_size * train.seq_len
    mirror = "on" if tensorboard_available() else "off: install tensorboardX"
    port = cfg.monitor.prometheus_port
    return [
        ("model", layer_row(cfg.model)),
        ("mesh", f"{sharding.describe(mesh)} ({device.device_kind})"),
        ("kda kernel", f"{kernel}: {why}"),
        *expert_rows(cfg, mesh),
        ("tokens", f"{tokens:,} in {train.steps:,} steps"),
        ("FLOPs", flops_row(cfg, device.device_kind)),
        ("start", f"resumed after step {first:,}" if first else "fresh"),
        ("results", str(folder)),
        ("tensorboard", mirror),
        ("prometheus", "off" if port is None else f"port {port}, /metrics"),
    ]
