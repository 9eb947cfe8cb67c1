"""How many devices hold a model: python -m experiments.weights --config=configs/X.py

Bytes of the parameters as they are published (bfloat16, routed experts of a latent
model in MXFP4) and as they are loaded (bfloat16 throughout), of the cache of one
sequence, and the fewest devices of each kind whose memory holds both at nine tenths,
if every device holds an even share. Allocates nothing.
"""

import math

from rich.console import Console

from experiments import cli
from kimi_jax import accounting, hardware
from kimi_jax.config import Model
from kimi_jax.modules.cache import cache_bytes, cache_shape
from kimi_jax.monitor.console import print_first_screen

LENGTHS = (8192, 131_072, 1_048_576)  # tokens of a sequence
KINDS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA B200")
_SHARE = 0.9  # of a device's memory; the rest is for activations
_MXFP4 = 17 / 32  # bytes of a value: half a byte, and a scale for 32

Row = tuple[str, ...]


def main(overrides: list[str]) -> None:
    config = cli.load_config(overrides)
    model = config.model
    print_first_screen(
        Console(),
        [
            (f"{config.name}: bytes of parameters", size_rows(model)),
            ("bytes of the cache of one sequence", cache_rows(model)),
            ("fewest devices", device_rows(model)),
        ],
    )


def size_rows(model: Model) -> list[Row]:
    """(part, published, loaded), and their sums."""
    rows: list[Row] = [("part", "published", "loaded")]
    totals = [0.0, 0.0]
    for part in accounting.parameter_parts(model):
        packed = part.name == "routed experts" and model.moe.latent_width is not None
        sizes = (part.total * (_MXFP4 if packed else 2), part.total * 2.0)
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        rows.append((part.name, *map(_size, sizes)))
    return [*rows, ("all", *map(_size, totals))]


def cache_rows(model: Model) -> list[Row]:
    """(tokens, what is of fixed size, what grows, both)."""
    rows: list[Row] = [("tokens", "KDA", "pages", "all")]
    for length in LENGTHS:
        fixed, pages = cache_size(model, length)
        sizes = (fixed, pages, fixed + pages)
        rows.append((f"{length:,}", *(_size(size, 3) for size in sizes)))
    return rows


def cache_size(model: Model, length: int) -> tuple[int, int]:
    """Bytes of the cache of one sequence: states and tails, pages."""
    parts = cache_bytes(cache_shape(model, 1, length))
    return parts["states"] + parts["conv tails"], parts["pages"]


def device_rows(model: Model) -> list[Row]:
    """(kind, for the weights, with a sequence of each length, slice for the last)."""
    weights = 2 * sum(part.total for part in accounting.parameter_parts(model))
    needed = [weights, *(weights + sum(cache_size(model, n)) for n in LENGTHS)]
    head = ("kind", "weights", *(f"+ {length:,}" for length in LENGTHS), "slice")
    rows: list[Row] = [head]
    kinds = {kind: "" for kind in KINDS}
    kinds |= {kind: name for name, kind in hardware.GENERATIONS.items()}
    for kind, generation in kinds.items():
        room = _SHARE * hardware.DEVICES[kind].memory
        counts = [math.ceil(size / room) for size in needed]
        shape = ""
        if generation:
            shape = hardware.smallest_slice(generation, counts[-1]) or "none"
        rows.append((kind, *(f"{count:,}" for count in counts), shape))
    return rows


def _size(size: float, digits: int = 1) -> str:
    return f"{size / 1e9:,.{digits}f} GB"


if __name__ == "__main__":
    cli.run(main, config=True)
