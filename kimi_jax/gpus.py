"""What keeps the NVIDIA GPUs of this machine from a run, before anything touches them.

JAX would find out late, minutes into compiling, or not at all: without peer access
collectives are slow and right. Everything comes from `nvidia-smi`; where it is missing
or does not answer, nothing is looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kimi_jax.errors import UserError

Ask = Callable[[Sequence[str]], str]

_QUERY = ("--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader")
_PEERS = ("topo", "-p2p", "r")
_SECONDS = 20
# Of a GPU's memory, in use by others: what a run could not do without.
_MOST_TAKEN = 0.5


class Card(NamedTuple):
    """One GPU; memory in MiB."""

    number: int
    name: str
    used: int
    total: int


def check(environment: Mapping[str, str] | None = None, ask: Ask | None = None) -> None:
    """Looks at the GPUs that this process may use. Call it before JAX takes memory.

    Args:
      environment: None: of this process.
      ask: the answer of nvidia-smi to its arguments, "" for none; None: asks it.

    Raises:
      UserError: a GPU is in use by others, or two cannot reach each other's memory.
    """
    environment = os.environ if environment is None else environment
    if environment.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return
    ask = _nvidia_smi if ask is None else ask
    cards = visible(parse_cards(ask(_QUERY)), environment.get("CUDA_VISIBLE_DEVICES"))
    found = taken(cards)
    if len(cards) > 1:
        found += apart(ask(_PEERS), [card.number for card in cards])
    if found:
        raise UserError("the GPUs are not ready:\n  " + "\n  ".join(found))


def parse_cards(text: str) -> list[Card]:
    """Lines such as "0, NVIDIA H200, 4 MiB, 143771 MiB"; others are skipped."""
    line = re.compile(r"\s*(\d+), (.+), (\d+) MiB, (\d+) MiB\s*")
    matches = [line.fullmatch(row) for row in text.splitlines()]
    return [Card(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]


def visible(cards: list[Card], chosen: str | None) -> list[Card]:
    """Those that CUDA_VISIBLE_DEVICES leaves; all, if it does not number them."""
    names = [] if chosen is None else [name.strip() for name in chosen.split(",")]
    if chosen is None or not all(name.isdigit() for name in names):
        return cards
    return [card for card in cards if str(card.number) in names]


def taken(cards: list[Card]) -> list[str]:
    """A line for each card whose memory is mostly in use."""
    busy = {card.number for card in cards if card.used > _MOST_TAKEN * card.total}
    free = ",".join(str(card.number) for card in cards if card.number not in busy)
    instead = f", or leave it out: CUDA_VISIBLE_DEVICES={free}" if free else ""
    return [
        f"GPU {card.number} ({card.name}): {card.used / 1024:.1f} of "
        f"{card.total / 1024:.1f} GiB are in use; end what uses it (nvidia-smi lists "
        f"processes){instead}"
        for card in cards
        if card.number in busy
    ]


def apart(matrix: str, numbers: Sequence[int]) -> list[str]:
    """A line for each pair of GPUs without peer access, by `nvidia-smi topo -p2p r`."""
    reasons = {
        "CNS": "the chipset does not allow it",
        "GNS": "one of them does not support it",
        "TNS": "the topology does not allow it",
        "NS": "it is not supported",
        "DR": "the driver's registry turned it off",
    }
    found = []
    for row in matrix.splitlines():
        name, *cells = re.sub(r"\x1b\[\d*m", "", row).split() or [""]
        here = re.fullmatch(r"GPU(\d+)", name)
        if here is None or (i := int(here[1])) not in numbers:
            continue
        for j in (j for j in numbers if i < j < len(cells)):
            if (why := reasons.get(cells[j])) is not None:
                found.append(
                    f"GPU {i} and GPU {j} have no peer access: {why}; choose GPUs of "
                    "one NVLink or PCIe domain by CUDA_VISIBLE_DEVICES (nvidia-smi "
                    "topo -m shows them), or give the virtual machine all of a board"
                )
    return found


def _nvidia_smi(arguments: Sequence[str]) -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
