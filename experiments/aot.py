r"""Compile a train step for devices that are not here, and say whether it fits.

    python -m experiments.aot --config=configs/k3.py --topology=v5p:16x16x16 \
        --config.mesh.fsdp=8 --config.mesh.expert=-1 [--json=FILE]

Without --topology it plans for the devices of this machine. The exit code is 1 if the
step does not fit; what would help is printed then.
"""

import json
import pathlib

import jax
from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax import plan, sharding, topology
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.monitor.metrics import replace_file, to_jsonable


def main(overrides: list[str]) -> int:
    console, name = Console(), flags.FLAGS.topology
    if name:
        # Nothing runs; looking for an accelerator here would only take time.
        jax.config.update("jax_platforms", "cpu")
    config = cli.load_config(overrides)
    mesh = sharding.make_mesh(config, topology.devices(name))
    device = mesh.devices.flat[0].device_kind
    console.print(
        f"{config.name} on {sharding.describe(mesh)}: {mesh.size:,} x {device}; "
        "compiling ..."
    )
    made = plan.make_plan(config, mesh)
    print_first_screen(console, plan.rows(config, made))
    for line in plan.advice(config, made):
        console.print(f"to make it fit: {line}")
    if flags.FLAGS.json:
        values = {"config": config.name, "topology": name, **plan.to_json(made)}
        text = json.dumps(to_jsonable(values), indent=2)
        replace_file(pathlib.Path(flags.FLAGS.json), text + "\n")
        console.print(f"written to {flags.FLAGS.json}")
    return 1 if made.memory.fits is False else 0


if __name__ == "__main__":
    flags.DEFINE_string("topology", "", "GENERATION:SHAPE, such as v5p:4x4x4")
    flags.DEFINE_string("json", "", "file for the plan, for programs")
    cli.run(main, config=True)
