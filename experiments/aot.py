r"""Compile a program for devices that are not here, and say whether it fits.

    python -m experiments.aot --config=configs/k3.py --topology=v5p:16x16x16 \
        --config.mesh.fsdp=8 --config.mesh.expert=-1 [--json=FILE]

The program is a train step; with --program=rl the learner's step of a config that has
an rl section; with --program=decode or prefill one of a generator with --slots
sequences of --length tokens. Without --topology it plans for the devices of this
machine. The exit code is 1 if it does not fit; what would help to fit a step is printed
then. With --effort=O1 the compiler tries less: about half its time, for a program that
takes a few percent more memory and sends more.
"""

import json
import pathlib

import jax
from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax import plan, sharding, topology
from kimi_jax.errors import UserError
from kimi_jax.infer import plan as infer_plan
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.monitor.metrics import replace_file, to_jsonable
from kimi_jax.rl.program import LEARNER
from kimi_jax.train.program import PRE_TRAINING

STEPS = {"train": PRE_TRAINING, "rl": LEARNER}


def main(overrides: list[str]) -> int:
    console, name = Console(), flags.FLAGS.topology
    if name:
        # Nothing runs; looking for an accelerator here would only take time.
        jax.config.update("jax_platforms", "cpu")
    config = cli.load_config(overrides)
    mesh = sharding.make_mesh(config, topology.devices(name))
    device = mesh.devices.flat[0].device_kind
    console.print(
        f"{config.name} on {sharding.describe(mesh)}: {mesh.size:,} x {device}; tracing"
    )
    made: plan.Plan | infer_plan.Plan
    advice: list[str] = []
    if flags.FLAGS.program in STEPS:
        if flags.FLAGS.program == "rl" and config.rl is None:
            raise UserError(
                f"--program=rl: {config.name} has no rl section; use a config that "
                "has one, such as configs/rl_tools.py or configs/k3.py:rl=1"
            )
        program, effort = STEPS[flags.FLAGS.program], flags.FLAGS.effort
        made = plan.make_plan(config, mesh, program, effort=effort, say=console.print)
        tables, values = plan.rows(config, made), plan.to_json(made)
        advice = plan.advice(config, made)
    else:
        made = infer_plan.make_plan(
            config,
            mesh,
            flags.FLAGS.program,
            slots=flags.FLAGS.slots,
            length=flags.FLAGS.length,
            chunk=flags.FLAGS.chunk,
            effort=flags.FLAGS.effort,
        )
        tables, values = infer_plan.rows(made), infer_plan.to_json(made)
    print_first_screen(console, tables)
    for line in advice:
        console.print(f"to make it fit: {line}")
    if flags.FLAGS.json:
        effort = flags.FLAGS.effort or "default"
        values = {"config": config.name, "topology": name, "effort": effort, **values}
        text = json.dumps(to_jsonable(values), indent=2)
        replace_file(pathlib.Path(flags.FLAGS.json), text + "\n")
        console.print(f"written to {flags.FLAGS.json}")
    return 1 if made.memory.fits is False else 0


if __name__ == "__main__":
    flags.DEFINE_string("topology", "", "GENERATION:SHAPE, such as v5p:4x4x4")
    flags.DEFINE_string("json", "", "file for the plan, for programs")
    programs = [*STEPS, "prefill", "decode"]
    flags.DEFINE_enum("program", "train", programs, "what is compiled")
    flags.DEFINE_integer("slots", 1, "prefill, decode: sequences at one time")
    flags.DEFINE_integer("length", 131072, "prefill, decode: most tokens of each")
    flags.DEFINE_integer("chunk", 8192, "prefill: tokens read in one call")
    efforts = list(plan.EFFORTS)
    flags.DEFINE_enum("effort", None, efforts, "of the compiler; low: sooner, rougher")
    cli.run(main, config=True)
