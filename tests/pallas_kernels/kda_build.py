"""Builds every kernel for a GPU that is not there, and prints what it costs.

python -m tests.pallas_kernels.kda_build 90    one JSON line a kernel
"""

import json
import os
import re
import subprocess
import sys
import tempfile

FLOATS = ("scale", "bound")
INTEGERS = ("T", "B", "N", "NSEG", "PIECES", "first_pair")
WIDE = (
    *("A_log", "dt_bias", "gam", "gam_out", "b", "b_out", "s0", "s_last", "ds0"),
    *("ds_last", "dA_out", "dbias_out", "db_out", "rows", "rows_out", "sizes"),
    *("size_out", "norms", "norms_out", "sums", "sums_out", "rise_out", "state"),
)
CONSTANTS = {
    **{"H": 32, "HV": 32, "K": 128, "V": 128, "C": 64, "W": 32, "WIDE": 32},
    **{"GATE": "bounded", "NORM": True, "SIGMOID": True, "DOUBLE": False},
    **{"PACKED": False, "BV": 64, "STAGES": 3, "SUMMARY": False, "SAVE": True},
    **{"OUTPUTS": True},
}


def kernels():
    from pallas_kernels.kda.gpu import bounded_intra, grads, intra, pairs, scan, step

    yield bounded_intra.bounded_intra_kernel, {}
    yield bounded_intra.bounded_intra_kernel, {"PACKED": True}
    yield intra.intra_kernel, {"GATE": "softplus"}
    yield scan.scan_kernel, {}
    yield scan.reverse_kernel, {}
    yield pairs.pairs_kernel, {}
    yield grads.grads_kernel, {}
    yield grads.grads_kernel, {"GATE": "softplus", "WIDE": 0}
    yield step.step_kernel, {}


def build(kernel, changes, arch: int) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**CONSTANTS, **changes}
    constants = {n: constants[n] for n in kernel.arg_names if n in constants}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS + FLOATS:
            signature[name] = "i32" if name in INTEGERS else "fp32"
        else:
            wide = name in WIDE
            signature[name] = "*i32" if name == "ids" else "*fp32" if wide else "*bf16"
            attributes[(index,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": 4, "num_stages": 3 if "STAGES" in constants else 1},
    )
    return {
        "kernel": kernel.fn.__name__,
        "shared": built.metadata.shared,
        **registers(built.asm["ptx"], arch),
    }


def registers(ptx: str, arch: int) -> dict[str, int]:
    """Asks the assembler that comes with Triton."""
    import triton

    name = "ptxas-blackwell" if arch >= 100 else "ptxas"
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", name)
    target = re.search(r"\.target (\w+)", ptx)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"-arch={target[1]}", file.name, "-o", os.devnull]
        text = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stderr
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    assert used and spilled, text
    return {"registers": int(used[1]), "spilled": int(spilled[1])}


if __name__ == "__main__":
    for kernel, changes in kernels():
        print(json.dumps(build(kernel, changes, int(sys.argv[1]))), flush=True)
