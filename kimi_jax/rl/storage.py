"""Trees of plain values and arrays as bytes, exactly: what a checkpoint keeps besides.

The bytes are a length, JSON, and the arrays one after the other. A float comes back to
the bit, a tuple as a tuple, and an array in its dtype, bfloat16 included. Nothing is
executed on the way in, unlike with pickle.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np

from kimi_jax.errors import UserError

_LENGTH = struct.Struct("<Q")
_KIND = "="  # the key that marks what JSON has no word for
_PLAIN = (bool, int, float, str)


def to_bytes(tree: Any) -> bytes:
    """The bytes of a tree of None, bool, int, float, str, bytes, array, list, tuple
    and dict with text as keys.

    Raises:
      TypeError: a value of another kind.
    """
    blobs = bytearray()
    text = json.dumps(_encode(tree, blobs), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, blobs])


def from_bytes(data: bytes) -> Any:
    """The tree that `to_bytes` was given.

    Raises:
      UserError: the bytes are not such a tree.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        return _decode(json.loads(data[_LENGTH.size : start]), memoryview(data)[start:])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the state of the run cannot be read ({error}); resume from an older "
            "checkpoint"
        ) from error


def _encode(value: Any, blobs: bytearray) -> Any:
    # Subclasses, such as named tuples, would come back as something else.
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encode(item, blobs) for item in value]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [_encode(item, blobs) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {
            _KIND: "dict",
            "items": {key: _encode(item, blobs) for key, item in value.items()},
        }
    if type(value) is bytes:
        return {_KIND: "bytes", "at": _store(value, blobs)}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {
            _KIND: "array",
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "at": _store(array.tobytes(), blobs),
        }
    raise TypeError(f"cannot store a {type(value).__name__}")


def _store(data: bytes, blobs: bytearray) -> list[int]:
    start = len(blobs)
    blobs += data
    return [start, len(blobs)]


def _decode(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_decode(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "tuple":
        return tuple(_decode(item, blobs) for item in value["items"])
    if kind == "dict":
        return {key: _decode(item, blobs) for key, item in value["items"].items()}
    start, stop = value["at"]
    data = bytes(blobs[start:stop])
    if kind == "bytes":
        return data
    return np.frombuffer(data, _dtype(value["dtype"])).reshape(value["shape"]).copy()


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
