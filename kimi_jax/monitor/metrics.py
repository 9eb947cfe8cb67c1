"""The metrics file of a run: one JSON object a line, written at once, read anywhere.

`metrics.jsonl` is the only source of the progress lines, the report and the plots, so
it has to survive what happens to runs. A line is complete on disk or it is not there:
a failed write is rolled back, a line cut by a kill is dropped by the reader, and a
resumed run first removes the records of the steps that it is about to repeat.

Strict JSON has no NaN or infinity. The rule here: non-finite floats are stored as the
strings "NaN", "Infinity" and "-Infinity", `read_metrics` turns exactly these strings
back into floats, and the writer refuses them as text, so the mapping is one to one.
"""

import contextlib
import errno
import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from kimi_jax.errors import UserError
from kimi_jax.monitor.tensorboard import TensorBoard

FILENAME = "metrics.jsonl"
Record = dict[str, Any]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def to_jsonable(value: Any, name: str = "value") -> Any:
    """Convert `value` to strict JSON types, following the non-finite rule above.

    Args:
        value: None, bool, number, text, path, NumPy or JAX scalar or array (any real
            dtype, bfloat16 included; reading a JAX array waits for its computation),
            or a mapping, list or tuple of these.
        name: how error messages call the value.

    Returns:
        The same structure in dict, list, str, int, float, bool and None. Floats keep
        their exact value: they go through float64, which holds all narrower types.

    Raises:
        ValueError: an unsupported type, a key that is not text, or one of the three
            reserved strings.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        if value in _NON_FINITE:
            raise ValueError(
                f"{name}: the text {value!r} is reserved for the non-finite float; "
                "pass the float itself or choose another text"
            )
        return value
    if isinstance(value, float):
        return _encode_float(float(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name}: keys must be text, got {key!r}")
        return {key: to_jsonable(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "__array__"):
        return _encode_array(value, name)
    raise ValueError(
        f"{name}: cannot store a {type(value).__name__}; allowed are None, bool, "
        "numbers, text, paths, NumPy or JAX arrays, and dicts and lists of these"
    )


def from_jsonable(value: Any) -> Any:
    """Invert the non-finite rule of `to_jsonable` in parsed JSON."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [from_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: from_jsonable(item) for key, item in value.items()}
    return value


def iter_metrics(path: str | os.PathLike) -> Iterator[Record]:
    """Yield the records of a metrics file in file order, one at a time.

    A last line that does not parse is what a kill leaves behind: it is dropped. The
    file may be in use by a running writer.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: a line other than the last is damaged (names the line).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no metrics at {path}: pass the workdir of a run that has started"
        )
    for _, record in _iter_lines(path):
        yield record


def read_metrics(path: str | os.PathLike) -> list[Record]:
    """All records of a metrics file as a list; see `iter_metrics`."""
    return list(iter_metrics(path))


def replace_file(path: str | os.PathLike, data: bytes | str) -> None:
    """Write a whole file so that a reader sees the old or the new one, never half.

    Raises:
        OSError: the write failed; the old file is intact and the message names `path`.
    """
    path = Path(path)
    if isinstance(data, str):
        data = data.encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _write_error(error, path) from error


class Mirror(Protocol):
    """Whoever wants to see every record as it is written."""

    def write(self, record: Record) -> None: ...


class MetricsWriter:
    """Appends records to `workdir/metrics.jsonl` and mirrors them to TensorBoard.

    Each `write` reaches the operating system before it returns, so a killed process
    loses nothing it reported. Use one writer per run, on process 0 only.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_step: int | None = None,
        mirrors: Sequence[Mirror] = (),
    ):
        """Open the metrics file of `workdir`, creating the directory if needed.

        Args:
            workdir: directory of the run; TensorBoard events go to its `tensorboard/`.
            resume_step: None for a fresh run. On resume, the step of the restored
                checkpoint (0 to start over in the same workdir): records of later
                steps and a half-written last line are removed first, in one rename.
            mirrors: shown each record once it is stored; the caller closes them.

        Raises:
            UserError: a fresh run finds records of another run, or the file is
                damaged.
            OSError: the file cannot be written; the message names it.
        """
        workdir = Path(workdir)
        self.path = workdir / FILENAME
        workdir.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            resume_step = _as_step(resume_step, "resume_step")
            if self.path.exists():
                _truncate_after(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise UserError(
                f"{self.path} already holds the records of a run: choose a new workdir "
                "or resume that run (resume_step=0 starts it over)"
            )
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (kept open)
        self._tensorboard = TensorBoard(workdir / "tensorboard", resume_step)
        self._mirrors = (self._tensorboard, *mirrors)

    def write(self, kind: str, step: int, **values: Any) -> Record:
        """Append one record and return it as it was stored, with "time" added.

        Args:
            kind: "train", "eval", "checkpoint", "alert" or "run".
            step: optimizer steps completed.
            **values: fields of the record, converted by `to_jsonable`.

        Returns:
            The record as `read_metrics` will return it.

        Raises:
            ValueError: the writer is closed, or a value cannot be stored.
            OSError: the write failed, for instance on a full disk. The message names
                the file, and the file still ends with a whole line.
        """
        if self._file.closed:
            raise ValueError(f"{self.path} is closed: write before close()")
        if "time" in values:
            raise ValueError('"time" is set by the writer: use another field name')
        record = {"kind": kind, "step": _as_step(step, "step"), "time": time.time()}
        record |= to_jsonable(values, kind)
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        self._append(line.encode())
        record = from_jsonable(record)
        for mirror in self._mirrors:
            mirror.write(record)
        return record

    def records(self) -> Iterator[Record]:
        """What is in the file; see `iter_metrics`."""
        return iter_metrics(self.path)

    def flush(self) -> None:
        """Force the records to the disk: call it before a checkpoint is saved."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _write_error(error, self.path) from error
        self._tensorboard.flush()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # A disk that fills up takes the head of a line first; the rollback keeps
            # the file valid for whoever resumes after making room.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise _write_error(error, self.path) from error


class SilentWriter:
    """Stands for `MetricsWriter` in the processes that do not write."""

    def write(self, kind: str, step: int, **values: Any) -> Record:
        """The record as the writer would return it."""
        record = {"kind": kind, "step": _as_step(step, "step"), "time": time.time()}
        return from_jsonable(record | to_jsonable(values, kind))

    def records(self) -> Iterator[Record]:
        return iter(())

    def flush(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


Writer = MetricsWriter | SilentWriter


def _encode_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _encode_array(value: Any, name: str) -> Any:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biu":
            return array.tolist()
        if array.dtype.kind in "cOSUMm":
            raise TypeError
        # bfloat16 and the float8 types are NumPy extension dtypes without a kind of
        # their own; the cast is the test that they are real numbers.
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        dtype = getattr(value, "dtype", type(value).__name__)
        raise ValueError(
            f"{name}: cannot store an array of dtype {dtype}; pass real numbers or "
            "booleans"
        ) from error
    return to_jsonable(array.tolist(), name)


def _iter_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    with open(path, "rb") as file:
        number, line = 0, file.readline()
        while line:
            # The next line is read first: only the last one may be damaged.
            number, following = number + 1, file.readline()
            record = _parse_line(line)
            if record is not None:
                yield line.rstrip(b"\n") + b"\n", record
            elif following:
                raise UserError(
                    f"{path}, line {number}: not a metrics record; delete that line "
                    "or restore the file"
                )
            line = following


def _parse_line(line: bytes) -> Record | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return from_jsonable(record) if isinstance(record.get("step"), int) else None


def _truncate_after(path: Path, step: int) -> None:
    kept = b"".join(
        line for line, record in _iter_lines(path) if record["step"] <= step
    )
    if len(kept) != path.stat().st_size:
        replace_file(path, kept)


def _as_step(value: Any, name: str) -> int:
    try:
        step = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer, got {value!r}") from error
    if step < 0:
        raise ValueError(f"{name} must be 0 or more, got {step}")
    return step


def _write_error(error: OSError, path: Path) -> OSError:
    fix = (
        "free some space, then resume the run"
        if error.errno in _DISK_FULL
        else "check that the directory exists and can be written"
    )
    reason = error.strerror or str(error)
    return OSError(error.errno, f"writing failed ({reason}): {fix}", os.fspath(path))
