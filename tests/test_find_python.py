"""Which Python `make setup` takes, on machines made of stand-ins."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "find_python"
# A stand-in answers the script's two questions: what are you, and which version.
STAND_IN = """#!{shell}
case $1 in -c) echo {version}. ;; *) echo {answer} ;; esac
"""
SHIM = "#!{shell}\necho 'pyenv: version not active' >&2\nexit 127\n"


class Machine:
    """A PATH, a home and a working folder with nothing of this machine's Pythons."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shell = shutil.which("sh")
        self.path = root / "bin"
        self.path.mkdir()
        for tool in ("cut", "head", "ls", "sed", "sort"):
            (self.path / tool).symlink_to(str(shutil.which(tool)))

    def add(self, name: str, version: str, answer: str | None = None) -> str:
        """Puts an interpreter on PATH, or below the root if `name` has a slash."""
        file = self.root / name if "/" in name else self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        answer = answer or str(file)
        file.write_text(
            STAND_IN.format(shell=self.shell, version=version, answer=answer)
        )
        file.chmod(0o755)
        return answer

    def add_shim(self, name: str) -> None:
        (self.path / name).write_text(SHIM.format(shell=self.shell))
        (self.path / name).chmod(0o755)

    def find(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.shell), str(SCRIPT)],
            cwd=self.root,
            env={"PATH": str(self.path), "HOME": str(self.root), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def finds(self, **environment: str) -> str:
        done = self.find(**environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.removesuffix("\n")

    def fails(self, **environment: str) -> str:
        done = self.find(**environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_this_interpreter_qualifies(machine: Machine) -> None:
    assert machine.finds(PYTHON=sys.executable) == sys.executable


def test_newest_on_the_path_is_taken(machine: Machine) -> None:
    machine.add("python3.12", "3.12.3")
    newest = machine.add("python3.13", "3.13.0")
    machine.add("python3", "3.12.3")
    assert machine.finds() == newest


def test_shims_that_do_not_run_are_passed_over(machine: Machine) -> None:
    machine.add_shim("python3.14")
    machine.add_shim("python3.12")
    machine.add("python3", "3.11.2", answer="old")
    machine.add(".pyenv/versions/3.9.18/bin/python", "3.9.18", answer="old")
    machine.add(".pyenv/versions/3.12.1/bin/python", "3.12.1")
    newest = machine.add(".pyenv/versions/3.12.10/bin/python", "3.12.10")
    assert machine.finds() == newest


def test_pyenv_may_live_elsewhere(machine: Machine) -> None:
    only = machine.add("my pyenv/versions/3.12.1/bin/python", "3.12.1")
    assert machine.finds(PYENV_ROOT=str(machine.root / "my pyenv")) == only


def test_environment_variable_is_an_order(machine: Machine) -> None:
    machine.add("python3.13", "3.13.0")
    chosen = machine.add("elsewhere/python", "3.12.0")
    assert machine.finds(PYTHON=chosen) == chosen
    machine.add("old", "3.11.2", answer="old")
    assert "PYTHON=old: not a Python >= 3.12 that runs" in machine.fails(PYTHON="old")
    assert "PYTHON=nowhere" in machine.fails(PYTHON="nowhere")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("3.12", ".pyenv/versions/3.12.1/bin/python"),
        ("3.12.1\n", ".pyenv/versions/3.12.1/bin/python"),
        ("# ours\n\n3.12  # not newer\n3.13\n", ".pyenv/versions/3.12.1/bin/python"),
        ("cpython-3.13", "bin/python3.13"),
        ("3.13.0", ".pyenv/versions/3.13.0/bin/python"),
    ],
)
def test_python_version_file_is_an_order(
    machine: Machine, content: str, found: str
) -> None:
    machine.add_shim("python3.12")
    machine.add("python3.13", "3.13.5")
    machine.add("python3.14", "3.14.0")
    for version in ("3.12.1", "3.13.0"):
        machine.add(f".pyenv/versions/{version}/bin/python", version)
    (machine.root / ".python-version").write_text(content)
    assert machine.finds() == str(machine.root / found)


def test_exact_version_is_not_another_patch_release(machine: Machine) -> None:
    machine.add("python3.12", "3.12.10")
    (machine.root / ".python-version").write_text("3.12.1")
    assert ".python-version asks for 3.12.1: no such" in machine.fails()
    exact = machine.add(".pyenv/versions/3.12.1/bin/python", "3.12.1")
    assert machine.finds() == exact


def test_version_file_that_asks_for_too_little(machine: Machine) -> None:
    machine.add("python3.11", "3.11.2", answer="old")
    machine.add("python3.13", "3.13.0")
    (machine.root / ".python-version").write_text("3.11")
    assert "asks for 3.11: no such Python >= 3.12" in machine.fails()


def test_none_found_says_what_to_install(machine: Machine) -> None:
    machine.add("python3", "3.11.2", answer="old")
    message = machine.fails()
    assert "no Python >= 3.12 found: install python3 and python3-venv" in message


def test_python_without_venv_is_named(machine: Machine) -> None:
    machine.add("python3", "3.12.3", answer="no-venv")
    message = machine.fails()
    assert "python3 is new enough but has no venv module: install python3" in message
    usable = machine.add(".pyenv/versions/3.12.1/bin/python", "3.12.1")
    assert machine.finds() == usable
