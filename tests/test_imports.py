"""Who may import whom, and that importing does nothing else.

    configs          ->  ml_collections
    pallas_kernels   ->  jax; its GPU kernels triton as well, which others import late
    kimi_jax.ops     ->  pallas_kernels
    kimi_jax.modules ->  kimi_jax.ops, config, layout
    kimi_jax.environments -> kimi_jax.tasks, the tokenizer, errors
    rest of kimi_jax ->  all of kimi_jax
    experiments      ->  everything; the only home of flags

The checks read the source, so that an import inside a function counts as well.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "pallas_kernels", "kimi_jax", "experiments")

# Longest prefix wins. A name allows itself and everything below it.
OURS = {
    "configs": {"configs"},
    "pallas_kernels": {"pallas_kernels"},
    "kimi_jax": {"kimi_jax", "pallas_kernels"},
    "kimi_jax.ops": {"kimi_jax.ops", "pallas_kernels"},
    "kimi_jax.modules": {
        "kimi_jax.config",
        "kimi_jax.layout",
        "kimi_jax.modules",
        "kimi_jax.ops",
        "kimi_jax.sharding",
        "pallas_kernels",
    },
    "kimi_jax.environments": {
        "kimi_jax.data.tokenizer",
        "kimi_jax.environments",
        "kimi_jax.errors",
        "kimi_jax.tasks",
    },
    "kimi_jax.sharding": {"kimi_jax.canonical", "kimi_jax.config", "kimi_jax.errors"},
    "experiments": set(PACKAGES),
}
# Packages of others; where a name has no entry, any dependency will do.
OTHERS = {
    "configs": {"ml_collections"},
    "pallas_kernels": {"jax", "numpy"},
    "pallas_kernels.kda.gpu": {"jax", "jax_triton", "numpy", "triton"},
    "kimi_jax.ops": {"jax", "numpy"},
    "kimi_jax.environments": {"numpy"},
    "kimi_jax.data": {"PIL", "etils", "grain", "numpy"},
}


def modules() -> Iterator[str]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = list(modules())
FLAGS = {"absl.app", "absl.flags", "argparse", "ml_collections.config_flags"}
KNOWN = {*MODULES, *FLAGS}
# Need an optional package to import, so others import them inside functions.
OPTIONAL = {m for m in MODULES if m.startswith("pallas_kernels.kda.gpu.")}


@cache
def tree(module: str) -> ast.Module:
    base = ROOT.joinpath(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(file.read_text(), str(file))


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Dotted names that are imported: a.b of `from a import b` if that is a module."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write it out"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                names.add(dotted if dotted in KNOWN else str(node.module))
    return names


def all_imports(module: str) -> set[str]:
    return imports(ast.walk(tree(module)))


def rule(table: dict[str, set[str]], module: str) -> set[str] | None:
    homes = [home for home in table if within(module, {home})]
    return table[max(homes, key=len)] if homes else None


def within(module: str, homes: set[str]) -> bool:
    return any(module == home or module.startswith(home + ".") for home in homes)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    ours = {name for name in all_imports(module) if within(name, {*PACKAGES, "tests"})}
    allowed = rule(OURS, module)
    assert allowed is not None
    wrong = sorted(name for name in ours if not within(name, allowed))
    assert not wrong, f"{module} imports {wrong}; it may import {sorted(allowed)}"


@pytest.mark.parametrize("module", [m for m in MODULES if rule(OTHERS, m) is not None])
def test_lower_layers_need_few_packages(module: str) -> None:
    allowed = rule(OTHERS, module) or set()
    known = allowed | set(PACKAGES) | sys.stdlib_module_names
    wrong = sorted(n for n in all_imports(module) if n.partition(".")[0] not in known)
    assert not wrong, f"{module} imports {wrong}; it may import {sorted(allowed)}"


@pytest.mark.parametrize(
    "module", [m for m in MODULES if not within(m, {"experiments"})]
)
def test_flags_live_in_experiments(module: str) -> None:
    wrong = sorted(name for name in all_imports(module) if within(name, FLAGS))
    assert not wrong, f"{module} imports {wrong}; read flags in experiments/ only"


def test_no_import_cycles() -> None:
    graph = {
        module: {name for name in imports(iter(tree(module).body)) if name in MODULES}
        for module in MODULES
    }
    while leaves := {module for module, uses in graph.items() if not uses}:
        graph = {m: uses - leaves for m, uses in graph.items() if m not in leaves}
    # Modules that only import members of a cycle remain too; the cycle is among these.
    assert not graph, f"import cycle among {sorted(graph)}"


@pytest.mark.parametrize("module", sorted({*MODULES} - OPTIONAL))
def test_optional_modules_are_imported_late(module: str) -> None:
    wrong = sorted(imports(iter(tree(module).body)) & OPTIONAL)
    assert not wrong, f"{module} imports {wrong} at the top; do so inside functions"


def test_importing_starts_no_backend_and_prints_nothing() -> None:
    below = [m for m in MODULES if not within(m, {"experiments"} | OPTIONAL)]
    # Any use of a device fails, as there is no platform of this name.
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(below)}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
