"""Real machine code for Hopper and Blackwell: fits the chip, and spills no more."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 232_448  # bytes a program can have, on both
# Bytes a thread that do not fit its registers, at K = V = 128, in the order of
# `kda_build.kernels`: bounded gate, that packed, any gate, scan, reverse, pairs,
# gradients under a bounded gate, under any, one step. Lower them, not raise.
SPILLED = {
    90: (156, 152, 1820, 0, 0, 0, 20, 712, 0),
    100: (300, 644, 520, 0, 0, 0, 24, 520, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", SPILLED)
def test_builds_without_more_spills(arch):
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.kda_build", str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line, spilled in zip(lines, SPILLED[arch], strict=True):
        assert line["shared"] <= SHARED_MEMORY, line
        assert line["spilled"] <= spilled, line
