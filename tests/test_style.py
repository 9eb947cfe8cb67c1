"""The house rules that a program can check."""

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("kimi_jax", "pallas_kernels", "experiments", "configs", "tests")
TOP_LEVEL = {
    *CODE,
    "LICENSE",
    "Makefile",
    "README.md",
    "docs",
    "pyproject.toml",
    "requirements.lock",
}
LINES_PER_FILE = 500
LINES_PER_FUNCTION = 60

# Written in two halves, so that this file passes its own test.
FORBIDDEN = {
    "unfinished work": rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'X' * 3})\b",
    "a registry address": "|".join(
        re.escape(first + second)
        for first, second in [
            ("py", "pi.org"),
            ("python", "hosted.org"),
            ("npm", "js.org"),
            ("index", "-url"),
            ("find", "-links"),
        ]
    ),
    "a path of one machine": r"(?<![\w.~$}])/(ro[o]t|ho[m]e|wo[r]k|tm[p])/",
}


def sources() -> Iterator[Path]:
    """Every text file that belongs to the project; not what git ignores."""
    for entry in sorted(ROOT.iterdir()):
        if entry.name in {".git", "LICENSE"} or ignored(entry.name):
            continue
        for file in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            parts = file.relative_to(ROOT).parts
            if file.is_file() and not any(map(ignored, parts)) and is_text(file):
                yield file


def ignored(name: str) -> bool:
    patterns = (ROOT / ".gitignore").read_text().split()
    return any(fnmatch.fnmatch(name, pattern.rstrip("/")) for pattern in patterns)


def is_text(file: Path) -> bool:
    return file.suffix not in {".npz", ".png", ".safetensors"}


def python_files() -> list[Path]:
    return [file for file in sources() if file.suffix == ".py"]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_top_level_has_the_agreed_names_only() -> None:
    found = {
        entry.name
        for entry in ROOT.iterdir()
        if not entry.name.startswith(".") and not ignored(entry.name)
    }
    assert found <= TOP_LEVEL, f"unexpected: {sorted(found - TOP_LEVEL)}"
    missing = TOP_LEVEL - {"docs"} - found
    assert not missing, f"missing: {sorted(missing)}"


@pytest.mark.parametrize("file", python_files(), ids=name)
def test_python_file_is_short_and_introduced(file: Path) -> None:
    text = file.read_text()
    lines = text.count("\n")
    assert lines <= LINES_PER_FILE, f"{lines} lines, at most {LINES_PER_FILE}; split it"
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "no docstring at the top"


@pytest.mark.parametrize(
    "file", [f for f in python_files() if not name(f).startswith("tests/")], ids=name
)
def test_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= LINES_PER_FUNCTION, (
                f"{node.name}, line {node.lineno}: {lines} lines, at most "
                f"{LINES_PER_FUNCTION}; split it"
            )


def test_packages_are_marked() -> None:
    # A folder without the file is left out of wheels without a word.
    folders = {file.parent for file in python_files()}
    bare = [
        name(folder)
        for folder in folders
        if not name(folder).startswith("tests")
        and not (folder / "__init__.py").exists()
    ]
    assert not bare, f"no __init__.py in {sorted(bare)}"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_forbidden_is_mentioned(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{name(file)}:{number}: {line.strip()}"
        for file in sources()
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)
