"""Saved rollouts are the same arrays and values when they are read."""

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.rl import rollout_state


@pytest.fixture
def state():
    rng = np.random.default_rng(0)
    draw = rng.standard_normal((2, 3, 4, 5))
    sequence = {"tokens": [1, 2, 3], "read": 2, "slot": 1, "source": -1, "shared": 0}
    arrays = {
        "states": {
            "stack/kda/state": draw.astype(np.float32),
            "stack/kda/q_tail": draw.astype(ml_dtypes.bfloat16)[..., ::2],
        },
        "pages": {"stack/mla/latent": draw.astype(ml_dtypes.float8_e4m3fn)},
        "routes": rng.integers(0, 900, (2, 1, 8)).astype(np.int32),
    }
    bare = {"states": {}, "pages": {}, "routes": None}
    return {
        "seed": 3,
        "members": [{"seconds": 0.1 + 0.2}],
        "sequences": [{**sequence, **arrays}, {**sequence, **bare}],
    }


def test_files_bring_back_every_bit(state, tmp_path):
    rollout_state.write(tmp_path / "kept", state)
    again = rollout_state.read(tmp_path / "kept")
    for one, other in zip(state["sequences"], again["sequences"], strict=True):
        for tree in ("states", "pages"):
            assert one[tree].keys() == other[tree].keys()
            for name, array in one.pop(tree).items():
                found = other[tree][name]
                assert found.dtype == array.dtype and found.shape == array.shape
                assert found.tobytes() == array.tobytes()
            del other[tree]
        routes = one.pop("routes"), other.pop("routes")
        np.testing.assert_array_equal(*routes)
        assert (routes[0] is None) == (routes[1] is None)
    assert again == state


@pytest.mark.parametrize("name", ["rollouts.json", "sequence_0000.npz"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_is_found(state, tmp_path, name, damage):
    rollout_state.write(tmp_path / "kept", state)
    file = tmp_path / "kept" / name
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    if damage == "lose":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        rollout_state.read(tmp_path / "kept")


def test_a_folder_is_not_written_twice(state, tmp_path):
    rollout_state.write(tmp_path / "kept", state)
    with pytest.raises(FileExistsError):
        rollout_state.write(tmp_path / "kept", state)
