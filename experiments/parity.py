"""Compare with the released code: python -m experiments.parity --checkpoint=DIR

Reads tokens and logits from DIR/expected.npz, or --expected, which was made with the
released code, computes the logits here, and compares. Where the file has hidden states
(hidden_i, after layer i) it names the first layer that deviates. Exits with 1 above
--atol. --dtype=float64 tells a mistake from rounding: a mistake stays.
"""

import dataclasses
import pathlib

import jax
from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax.errors import UserError
from kimi_jax.interop import parity
from kimi_jax.interop.load import load_model


def main(overrides: list[str]) -> int:
    values, console = flags.FLAGS, Console()
    if overrides or not values.checkpoint:
        raise UserError("write --checkpoint=DIR; there is no --config here")
    file = values.expected or pathlib.Path(values.checkpoint) / "expected.npz"
    expected = parity.read_expected(file)
    with jax.enable_x64(values.dtype == "float64"):
        stored = None if values.dtype == "bfloat16" else values.dtype
        model, variables = load_model(values.checkpoint, dtype=stored)
        model = dataclasses.replace(model, dtype=values.dtype)
        ours = parity.logits(model, variables, expected)
        layer, errors = parity.first_deviation(model, variables, expected, values.atol)
    found = parity.compare(ours, expected["logits"])
    for i, error in errors.items():
        console.print(f"layer {i}: max_abs_err={error:.3g}", highlight=False)
    if layer is not None:
        console.print(
            f"layer {layer} is the first of those compared that deviates by more than "
            f"{values.atol:g} of its largest value: look between the one before and it",
            highlight=False,
        )
    passed = found.max_abs_err <= values.atol
    if not passed and values.dtype != "float64":
        console.print(
            f"above --atol={values.atol:g}; if --dtype=float64 is not, it is rounding",
            highlight=False,
        )
    console.print(found.line(), highlight=False)
    return int(not passed)


if __name__ == "__main__":
    flags.DEFINE_string("checkpoint", None, "published folder, or a native checkpoint")
    flags.DEFINE_string("expected", None, "file; left out: expected.npz in the folder")
    flags.DEFINE_float("atol", 1e-4, "largest error of a logit that passes")
    kinds = ["float64", "float32", "bfloat16"]
    flags.DEFINE_enum("dtype", "float32", kinds, "of activations")
    cli.run(main)
