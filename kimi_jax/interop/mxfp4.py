"""MXFP4, the format of the released experts: 4-bit floats with a scale for every 32.

A code is E2M1: three bits for 0, 0.5, 1, 1.5, 2, 3, 4 or 6, the fourth for the sign.
Two share a byte, the even input in its low half. A scale is one byte e that stands for
2^(e - 127), for 32 inputs that follow each other. Every value has two significant bits,
so bfloat16 holds it exactly.

Source: OCP Microscaling Formats, version 1.0; the released checkpoints.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 32
_BIAS = 127
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# Both values of a byte, so that a look-up unpacks two: [256, 2].
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)
_LARGEST_EXPONENT = 2  # of the largest code, 6 = 1.5 * 2^2


def unpack(codes: np.ndarray, scales: np.ndarray, dtype: object) -> np.ndarray:
    """Values [..., in] of codes uint8 [..., in / 2] and scales uint8 [..., in / 32].

    Raises:
      ValueError: dtypes or shapes that do not fit together.
    """
    if codes.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"codes {codes.dtype}, scales {scales.dtype}; both are uint8")
    size = 2 * codes.shape[-1]
    if size != GROUP * scales.shape[-1] or codes.shape[:-1] != scales.shape[:-1]:
        raise ValueError(
            f"codes {codes.shape} hold {size} inputs, scales {scales.shape} are for "
            f"{GROUP * scales.shape[-1]}"
        )
    exact = np.dtype(dtype) in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
    table = _PAIRS.astype(dtype if exact else np.float32)
    powers = np.exp2(np.arange(255, dtype=np.float32) - _BIAS)
    powers = np.append(powers, np.float32(np.nan))  # the byte 255 is the format's NaN
    grouped = table[codes].reshape(*scales.shape, GROUP)
    values = grouped * powers.astype(table.dtype)[scales][..., None]
    return values.reshape(*codes.shape[:-1], size).astype(dtype, copy=False)


def pack(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of values [..., in], `in` a multiple of 32.

    The scale of a group is 2^(floor(log2(largest)) - 2), as the format's document has
    it; codes are the nearest, ties to the even one, and saturate at 6. Values that came
    from `unpack` keep their value exactly, but not always their bytes: a group without
    a code of 4 or more could have had a smaller scale. So packed checkpoints keep their
    bytes, and this is for weights that were never packed.

    Raises:
      ValueError: `in` is no multiple of 32, or a value is not finite.
    """
    if values.shape[-1] % GROUP:
        raise ValueError(f"{values.shape[-1]} inputs; must be a multiple of {GROUP}")
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], -1, GROUP)
    if not np.all(np.isfinite(grouped)):
        raise ValueError("a value is not finite; MXFP4 has no code for it")
    largest = np.max(np.abs(grouped), axis=-1)
    exponent = np.frexp(largest)[1] - 1 - _LARGEST_EXPONENT
    exponent = np.where(largest > 0, np.clip(exponent, -_BIAS, _BIAS), -_BIAS)
    scaled = np.ldexp(grouped, -exponent[..., None])
    magnitudes = np.minimum(np.abs(scaled), _MAGNITUDES[-1])
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    # Below a middle is the lower code; on it, the even one.
    low = np.searchsorted(middles, magnitudes, side="left").astype(np.uint8)
    on_middle = magnitudes == middles[np.minimum(low, middles.size - 1)]
    code = low + (on_middle & (low % 2 == 1))
    code = (code | np.signbit(scaled).astype(np.uint8) << 3).astype(np.uint8)
    code = code.reshape(*values.shape[:-1], -1)
    codes = code[..., 0::2] | code[..., 1::2] << 4
    return codes, (exponent + _BIAS).astype(np.uint8)
