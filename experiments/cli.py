"""What every command shares: `--config`, overrides, and errors without tracebacks.

`--config=configs/FILE.py[:arg]` loads a file; `--config.a.b=c` sets a field. The
overrides are read by the types of `kimi_jax.config`, not by those that the values in
the file happen to have, so a field whose value is None can be set, and every mistake is
reported together with its fix.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import inspect
import os
import pathlib
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging

from configs import common
from kimi_jax import config_io, distributed
from kimi_jax.config import Config
from kimi_jax.errors import UserError

_FIELDS = """\
  --config.a.b=VALUE: sets a field of that file, as in --config.train.steps=100;
    kimi_jax/config.py says what each field of an experiment means, and
    configs/common.py has the values that the files start from

With --config=FILE --help tells what that file is for as well.
"""


_MEND = {
    errno.EROFS: "; name a folder on a disk that can be written to",
    errno.EACCES: "; name a folder that you may write to, or change its permissions",
    errno.ENOTDIR: "; a folder of that path is a file, name another",
    errno.ENOSPC: "; free some space, or name a folder on another disk",
}


def run(
    main: Callable[[list[str]], int | None],
    *,
    config: bool = False,
    workdir: bool = False,
    optional: bool = False,
) -> None:
    """Parse the command line and call `main` with the overrides; exits with its code.

    Args:
      config: the command takes --config.
      workdir: the command takes --workdir.
      optional: these flags may be left out.
    """
    if config:
        flags.DEFINE_string(
            "config", None, "experiment file, configs/FILE.py or configs/FILE.py:arg"
        )
    if workdir:
        flags.DEFINE_string("workdir", None, "folder of the run")
    if not optional:
        required = {"config": config, "workdir": workdir}
        flags.mark_flags_as_required([name for name in required if required[name]])
    argv, overrides = split_overrides(sys.argv)
    if "--help" in argv:
        sys.exit(_help(argv))
    _set_xla_flags()
    # Libraries log every checkpoint and device; a run prints its own lines.
    logging.set_verbosity(logging.WARNING)

    def guarded(arguments: Sequence[str]) -> int:
        try:
            _refuse(arguments[1:])
            return main(overrides) or 0
        except UserError as error:
            code = getattr(error, "exit_code", 1)
            print(f"error: {error}", file=sys.stderr)
            distributed.leave(code)
            return code
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            print(f"error: {_lost(error)}", file=sys.stderr)
            distributed.leave(1)
            return 1
        except KeyboardInterrupt:
            print("stopped at once; finished checkpoints are intact", file=sys.stderr)
            sys.stderr.flush()
            # A plain exit would first wait for the threads that write a checkpoint.
            os._exit(128 + signal.SIGINT)
        except OSError as error:
            if error.filename is None:
                raise
            mend = _MEND.get(error.errno or 0, "")
            print(f"error: {error.filename}: {error.strerror}{mend}", file=sys.stderr)
            distributed.leave(1)
            return 1

    app.run(guarded, argv=argv)


def _help(argv: Sequence[str]) -> int:
    """Prints what the command is for, its flags, and what the file in --config asks."""
    print(inspect.cleandoc(sys.modules["__main__"].__doc__ or ""))
    print("\nflags:\n")
    for flag in ("config", "workdir"):  # defined here, not in the command's own file
        if flag in flags.FLAGS:
            print(f"  --{flag}: {flags.FLAGS[flag].help}")
    print(flags.FLAGS.main_module_help().partition("\n")[2])
    if "config" not in flags.FLAGS:
        return 0
    print(_FIELDS)
    given = [item for item in argv if item.startswith("--config=")]
    if given:
        flags.FLAGS.mark_as_parsed()
        flags.FLAGS["config"].value = given[-1].partition("=")[2]
        try:
            file = load_file()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{file.path}:\n\n{inspect.cleandoc(file.module.__doc__ or '')}")
    return 0


def _lost(error: Exception) -> str:
    """What one of several processes says when JAX fails in it."""
    return (
        f"process {jax.process_index()} of {jax.process_count()} cannot go on: "
        f"{str(error).splitlines()[0]}\nif another one ended, its log says why; the "
        "same command in all processes resumes the run"
    )


def _refuse(words: Sequence[str]) -> None:
    """Raises UserError for words on the command line that belong to no flag."""
    if words:
        raise UserError(
            f"{words[0]!r} is no flag; flags are --name=value, and fields of the "
            "config --config.a.b=value"
        )


def _set_xla_flags() -> None:
    """Flags that the project needs; those that the user has set stay as they are."""
    flags_set = os.environ.get("XLA_FLAGS", "")
    # jaxlib 0.11.2 cannot update command buffers around the Triton kernels of KDA.
    if "xla_gpu_enable_command_buffer" not in flags_set:
        flags_set = f"{flags_set} --xla_gpu_enable_command_buffer=".strip()
    os.environ["XLA_FLAGS"] = flags_set


def load_config(overrides: Sequence[str]) -> Config:
    """The checked config that `--config` and the overrides describe.

    Where `--config` may be left out, and is, the values are those of configs/common.py.
    """
    if flags.FLAGS.config is None:
        return config_io.from_dict(common.base(), overrides)
    return config_io.from_dict(load_values(), overrides)


def load_values() -> Any:
    """What `get_config` of the file in `--config` returns."""
    return load_file().call("get_config")


class ExperimentFile(NamedTuple):
    """The file in `--config`, loaded, and the argument after its colon."""

    path: str
    module: types.ModuleType
    argument: str

    def call(self, name: str, argument: str | None = None) -> Any:
        """What the function `name` of the file returns.

        Args:
          argument: None: the one after the colon; an empty one is not passed on.

        Raises:
          UserError: there is no such function, or it does not take the argument.
        """
        if not hasattr(self.module, name):
            raise UserError(f"--config={self.path}: defines no {name}()")
        function = getattr(self.module, name)
        argument = self.argument if argument is None else argument
        if argument and not inspect.signature(function).parameters:
            raise UserError(
                f"--config={self.path}:{argument}: {name}() of this file takes no "
                "argument; leave out what follows the colon"
            )
        try:
            return function(argument) if argument else function()
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            where = f"{self.path}:{argument}" if argument else self.path
            raise UserError(f"--config={where}: {error}") from error


def load_file() -> ExperimentFile:
    """The file in `--config`."""
    path, _, argument = flags.FLAGS.config.partition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        raise UserError(f"--config={path}: no such file; {_instead(file)}")
    spec = importlib.util.spec_from_file_location("experiment_config", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return ExperimentFile(path, module, argument)


def _instead(file: pathlib.Path) -> str:
    """What to do about a config file that does not exist."""
    folder = pathlib.Path("configs")
    if not folder.is_dir():
        return "run the command from the folder of the repository, which has configs/"
    others = ("__init__", "common", "hyper")
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in others)
    near = difflib.get_close_matches(file.stem, names, n=1)
    hint = f"did you mean configs/{near[0]}.py? " if near else ""
    return f"{hint}there are configs/{{{', '.join(names)}}}.py"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(arguments for absl, overrides as "a.b=c").

    A value may be attached or be the next argument. With neither, "a.b" is left, which
    means true for a field that may be; `--noconfig.a.b` means false.
    """
    rest, overrides = [], []
    items = list(argv)
    while items:
        item = items.pop(0)
        name = item.removeprefix("-").removeprefix("-")
        if not item.startswith("-") or not name.startswith(("config.", "noconfig.")):
            rest.append(item)
            continue
        field = name.partition("config.")[2]
        if name.startswith("noconfig."):
            overrides.append(f"{field}=false")
        elif "=" in field:
            overrides.append(field)
        elif items and not items[0].startswith("--"):
            overrides.append(f"{field}={items.pop(0)}")
        else:
            overrides.append(field)
    return rest, overrides
