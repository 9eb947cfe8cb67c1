"""Packed documents and padding: nothing crosses a border, padding does nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.segments import find_runs
from tests.pallas_kernels import kda_cases as cases

TIME = 70
# Borders inside tiles, on tiles and on chunks; padding everywhere; an id that returns.
LENGTHS = [
    [(0, 3), (4, 9), (0, 4), (4, 3), (1, 13), (2, 1), (9, 15), (0, 2), (4, 17), (0, 3)],
    [(7, 16), (3, 16), (0, 16), (3, 16), (8, 6)],
]
IDS = np.array([np.repeat(*zip(*row, strict=True)) for row in LENGTHS])


def packed(dtype="float64", ids=IDS, x=None, **settings):
    x = cases.prepared("random", TIME) if x is None else x
    settings = {"lower_bound": -5.0, "chunk_size": 16, **settings}
    return cases.run(x, ids, dtype=dtype, **settings)


def test_runs_look_through_padding():
    ids = jnp.array([[0, 5, 5, 0, 5, 2, 0, 0, 5, 0], [0] * 10])
    runs = cases.jit(find_runs)(ids)
    np.testing.assert_array_equal(runs.run_BT[0], [0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(np.flatnonzero(runs.starts_BT), [5, 8])
    np.testing.assert_array_equal(runs.real_BT, ids != 0)


@pytest.mark.parametrize(
    ("dtype", "settings", "tolerance"),
    [
        ("float64", {}, 1e-13),
        ("float64", {"chunk_size": 64, "lower_bound": None}, 1e-13),
        ("float32", {}, 4e-6),
    ],
)
def test_matches_recurrence(dtype, settings, tolerance):
    x = cases.prepared("random", TIME)
    reference = cases.run(
        cases.rounded(x, dtype),
        IDS,
        out=cases.cotangents(TIME),
        implementation="reference",
    )
    cases.assert_close(packed(dtype, **settings), reference, tolerance)


def test_packed_equals_separate():
    """Each document alone in a row of its own, in value and gradient."""
    x = cases.prepared("random", TIME)
    do, dstate = cases.cotangents(TIME)
    together = packed()
    per_token = [name for name in x if name != "initial_state"]
    real = IDS != 0
    starts = np.zeros_like(real)
    for row, ids in enumerate(IDS):
        (tokens,) = np.nonzero(ids)
        starts[row, tokens[1:]] = np.diff(ids[tokens]) != 0
    documents = np.cumsum(starts, axis=1)
    last = documents.max(axis=1)
    for document in range(last.max() + 1):
        # All rows at once: row r holds its document number `document`, if it has one.
        inside = real & (documents == document)
        order = np.argsort(~inside, axis=1, kind="stable")
        ids = np.take_along_axis(inside, order, axis=1)

        def left_aligned(value, order=order, ids=ids):
            index = order.reshape(order.shape + (1,) * (value.ndim - 2))
            value = np.take_along_axis(value, index, axis=1)
            return np.where(ids.reshape(index.shape), value, 0)

        alone = {name: left_aligned(x[name]) for name in per_token}
        first, final = document == 0, (document == last)[:, None, None, None]
        alone["initial_state"] = x["initial_state"] * first
        out = left_aligned(do), dstate * final
        got = packed(ids=ids, x=alone, out=out)
        expected = {
            name: left_aligned(together[name])
            for name in together
            if name.removeprefix("d") in [*per_token, "o"]
        }
        for name in ("state", "dinitial_state"):
            keep = final if name == "state" else first
            got[name], expected[name] = got[name] * keep, together[name] * keep
        cases.assert_close(got, expected, 1e-13)


def test_no_gradient_crosses_a_border():
    """The loss reads one document in the middle; all other gradients are exactly 0."""
    do, dstate = cases.cotangents(TIME)
    chosen = np.array([IDS[0] == 9, IDS[1] == 3])
    got = packed(out=(do * chosen[..., None, None], 0 * dstate))
    assert np.all(got["dinitial_state"] == 0)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.all(got[name][~chosen] == 0), name
        assert np.any(got[name][chosen] != 0), name


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_padding_is_inert(implementation):
    """Not even NaN and infinity in padding change anything."""
    x = cases.raw(TIME)
    settings = {**cases.IN_KERNEL, "implementation": implementation}
    settings |= {"lower_bound": -5.0, "chunk_size": 16}
    padding = IDS == 0
    clean = cases.run(x, IDS, **settings)
    assert np.all(clean["o"][padding] == 0)
    do, dstate = cases.cotangents(TIME)
    dirty = {name: value.copy() for name, value in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        dirty[name][padding] = np.nan if name in "qvg" else np.inf
    do[padding] = np.nan
    got = cases.run(dirty, IDS, (do, dstate), **settings)
    for name, value in clean.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.all(got[name][padding] == 0), name


def test_padding_between_equal_ids_does_not_reset():
    x = cases.prepared("random", TIME)
    ids = np.where(np.arange(TIME) % 7 < 3, 0, 6) * np.ones((cases.B, 1), int)
    got = packed(x=x, ids=ids)
    tokens = np.flatnonzero(ids[0])
    dense = {n: a[:, tokens] for n, a in x.items() if n != "initial_state"}
    o, state = cases.oracle({**dense, "initial_state": x["initial_state"]})
    np.testing.assert_allclose(got["o"][:, tokens], o, atol=1e-13)
    np.testing.assert_allclose(got["state"], state, atol=1e-13)


def test_row_of_padding_returns_its_state():
    x = cases.prepared("random", TIME)
    got = packed(x=x, ids=np.zeros_like(IDS))
    np.testing.assert_array_equal(got["state"], x["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], cases.cotangents(TIME)[1])
    assert np.all(got["o"] == 0)


def test_document_can_continue_in_the_next_call():
    """State hand-off in the middle of a document, packed with others."""
    x = cases.prepared("random", TIME)
    whole = packed(x=x)
    whole = {name: whole[name] for name in ("o", "state")}
    cut = TIME // 2
    head = {n: a[:, :cut] for n, a in x.items() if n != "initial_state"}
    tail = {n: a[:, cut:] for n, a in x.items() if n != "initial_state"}
    first = packed(
        x={**head, "initial_state": x["initial_state"]},
        ids=IDS[:, :cut],
        gradients=False,
    )
    second = packed(
        x={**tail, "initial_state": first["state"]}, ids=IDS[:, cut:], gradients=False
    )
    o = np.concatenate([first["o"], second["o"]], axis=1)
    cases.assert_close({"o": o, "state": second["state"]}, whole, 1e-13)
