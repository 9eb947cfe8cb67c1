"""How many devices hold a model: python -m experiments.weights --config=configs/X.py

Bytes of the parameters as they are published (bfloat16, routed experts of a latent
model in MXFP4) and as they are loaded (bfloat16 throughout), and the fewest devices of
each kind whose memory holds the latter at nine tenths. Allocates nothing.
"""

import math

from rich.console import Console

from experiments import cli
from kimi_jax import accounting, hardware
from kimi_jax.config import Model
from kimi_jax.monitor.console import print_first_screen

_SHARE = 0.9  # of a device's memory; the rest is for activations and caches
_MXFP4 = 17 / 32  # bytes of a value: half a byte, and a scale for 32


def main(overrides: list[str]) -> None:
    config = cli.load_config(overrides)
    print_first_screen(
        Console(),
        [
            (f"{config.name}: bytes of parameters", size_rows(config.model)),
            ("fewest devices", device_rows(config.model)),
        ],
    )


def size_rows(model: Model) -> list[tuple[str, str, str]]:
    """(part, published, loaded), and their sums."""
    rows, totals = [("part", "published", "loaded")], [0.0, 0.0]
    for part in accounting.parameter_parts(model):
        packed = part.name == "routed experts" and model.moe.latent_width is not None
        sizes = (part.total * (_MXFP4 if packed else 2), part.total * 2.0)
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        rows.append((part.name, *map(_size, sizes)))
    return [*rows, ("all", *map(_size, totals))]


def device_rows(model: Model) -> list[tuple[str, str]]:
    """(kind, how many)."""
    loaded = 2 * sum(part.total for part in accounting.parameter_parts(model))
    return [
        (kind, f"{math.ceil(loaded / (_SHARE * device.memory)):,}")
        for kind, device in hardware.DEVICES.items()
    ]


def _size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


if __name__ == "__main__":
    cli.run(main, config=True)
