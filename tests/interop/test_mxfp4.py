"""MXFP4 against the format's own tables, and the golden bytes."""

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.interop import mxfp4
from tests.interop import goldens

E2M1 = ml_dtypes.float4_e2m1fn


def test_unpack_is_the_formats_definition():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (3, 4, 32), np.uint8)
    scales = rng.integers(100, 150, (3, 4, 2), np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, 4, 64)
    values = nibbles.astype(np.uint8).view(E2M1).astype(np.float64)
    wanted = values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        made = mxfp4.unpack(codes, scales, dtype)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made.astype(np.float64), wanted)
        # The sign of zero as well.
        np.testing.assert_array_equal(
            np.signbit(made.astype(np.float32)), np.signbit(wanted)
        )


def test_the_scale_255_is_not_a_number():
    codes, scales = np.full((1, 16), 0x11, np.uint8), np.full((1, 1), 255, np.uint8)
    assert np.isnan(mxfp4.unpack(codes, scales, np.float32)).all()


def test_packing_keeps_representable_values():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (50, 64), np.uint8)
    codes[0] = 0  # a group of zeros
    codes[1] &= 0x33  # no code of 2 or more: a smaller scale would do
    scales = rng.integers(3, 250, (50, 4), np.uint8)
    values = mxfp4.unpack(codes, scales, np.float32)
    again = mxfp4.unpack(*mxfp4.pack(values), np.float32)
    assert again.tobytes() == values.tobytes()


def test_packing_rounds_to_the_nearest_and_ties_to_even():
    rng = np.random.default_rng(2)
    values = rng.standard_normal((200, 32)).astype(np.float32)
    values[:, 0] = 6.0  # fixes the scale at 1
    values[0, 1:8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    values[1, 1] = 7.9
    values[1, 0] = 4.0
    codes, scales = mxfp4.pack(values)
    assert (scales == 127).all()
    wanted = np.clip(values, -6, 6).astype(E2M1).astype(np.float32)
    np.testing.assert_array_equal(mxfp4.unpack(codes, scales, np.float32), wanted)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="33 inputs; must be a multiple of 32"):
        mxfp4.pack(np.zeros((2, 33), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4.pack(np.full((2, 32), np.inf, np.float32))
    with pytest.raises(ValueError, match="hold 64 inputs, scales"):
        mxfp4.unpack(
            np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8), np.float32
        )


def test_the_golden_experts_pack_to_their_own_bytes():
    tensors = goldens.tensors(goldens.FOLDER / "k3_tiny_mxfp4")
    names = [n.removesuffix("_packed") for n in tensors if n.endswith("_packed")]
    assert len(names) == 4 * 8 * 3
    for name in names[:6]:
        codes, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        again = mxfp4.pack(mxfp4.unpack(codes, scales, np.float32))
        np.testing.assert_array_equal(again[0], codes)
        np.testing.assert_array_equal(again[1], scales)
