"""Convert checkpoints: python -m experiments.convert --from=DIR --to=DIR

From a published Hugging Face folder to a native checkpoint, or from a native one back;
what --from holds decides. Nothing is at --to before all of it is there and was read
again; the same command goes on after a kill. Memory is a few tensors, whatever the size
of the model (docs/interop.md).
"""

import os
import time

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax.errors import UserError
from kimi_jax.interop.from_native import DTYPES, from_native
from kimi_jax.interop.sources import is_published
from kimi_jax.interop.to_native import to_native
from kimi_jax.monitor.interop import conversion_lines


def main(overrides: list[str]) -> None:
    values = flags.FLAGS
    source, target = values["from"].value, values.to
    if overrides or not source or not target:
        raise UserError("write --from=DIR and --to=DIR; there is no --config here")
    if values.workers < 1:
        raise UserError(f"--workers={values.workers}: must be at least 1")
    console, started = Console(), time.monotonic()
    show = conversion_lines(console)
    if is_published(source):
        if values.dtype != "stored":
            raise UserError(
                f"--dtype={values.dtype}: a native checkpoint keeps the published "
                "dtypes; pass the flag on the way back"
            )
        total = to_native(source, target, workers=values.workers, show=show)
    else:
        total = from_native(
            source, target, workers=values.workers, dtype=values.dtype, show=show
        )
    seconds = time.monotonic() - started
    console.print(
        f"{total:,} bytes of tensors in {seconds:.1f} s, verified: {target}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    flags.DEFINE_string("from", None, "published folder, workdir or checkpoints/STEP")
    flags.DEFINE_string("to", None, "folder to make; must not exist")
    flags.DEFINE_integer("workers", min(8, os.cpu_count() or 1), "threads")
    flags.DEFINE_enum("dtype", "stored", DTYPES, "of published tensors (docs)")
    cli.run(main)
