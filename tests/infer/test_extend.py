"""Reading in pieces equals reading at once, whatever the pieces are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.modules import cache as cache_lib
from kimi_jax.modules import transformer
from tests import tiny
from tests.infer import models

B, T, PAGE = 3, 40, 4
# Tokens that each row reads in each call, of 16 or of 1 at most.
CALLS = [
    (16, (7, 0, 12)),
    (16, (16, 3, 5)),
    (1, (1, 1, 1)),
    (1, (1, 0, 1)),
    (16, (10, 16, 9)),
    (1, (1, 1, 1)),
]


@functools.partial(jax.jit, static_argnums=0)
def whole(model, variables, tokens):
    return transformer.apply(model, variables, tokens).h_BTD


@functools.partial(jax.jit, static_argnums=0)
def extend(model, variables, tokens, count, cache):
    out, cache = transformer.extend(model, variables, tokens, count, cache)
    return out.h_BTD, cache


def in_pieces(model, variables, tokens, cache):
    """[hidden states of each row], and the cache; padding holds a token of its own."""
    done, found = np.zeros(B, int), [[] for _ in range(B)]
    for size, counts in CALLS:
        piece = np.full((B, size), 77, np.int32)
        for row, count in enumerate(counts):
            piece[row, :count] = tokens[row, done[row] : done[row] + count]
        h, cache = extend(model, variables, piece, np.array(counts, np.int32), cache)
        for row, count in enumerate(counts):
            found[row].append(np.asarray(h[row, :count]))
        done += counts
    return [np.concatenate(row) for row in found], cache


@pytest.mark.parametrize("overrides", [models.HYBRID, models.ROTATED])
def test_ragged_pieces_equal_the_whole_in_float64(overrides):
    with jax.enable_x64(True):
        model = tiny.make("model.dtype=float64", *overrides).model
        variables = tiny.variables(model)
        tokens = models.tokens(0, B, T)
        want = np.asarray(whole(model, variables, tokens))
        empty = cache_lib.init_cache(model, B, T, page_size=PAGE)
        rows, cache = in_pieces(model, variables, tokens, empty)
        np.testing.assert_array_equal(cache.length_B, [len(row) for row in rows])
        for row, got in enumerate(rows):
            scale = np.abs(want).max()
            np.testing.assert_allclose(got, want[row, : len(got)], atol=1e-12 * scale)


def test_rows_may_share_pages_and_old_values_do_no_harm():
    """Scattered pages, a shared prefix, and nan in what nobody owns any more."""
    with jax.enable_x64(True):
        model = tiny.make("model.dtype=float64", *models.HYBRID).model
        variables = tiny.variables(model)
        tokens = np.repeat(models.tokens(1, 1, T), B, axis=0)
        want = np.asarray(whole(model, variables, tokens))
        cache = cache_lib.init_cache(model, B, T, page_size=PAGE)
        cache = cache._replace(
            pages=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.pages),
            table_BM=np.random.default_rng(2).permutation(B * 10).reshape(B, 10),
        )
        piece = tokens[:, :16]
        _, cache = extend(model, variables, piece, np.array([16, 0, 0]), cache)
        # Rows 1 and 2 take over the 4 pages and the states of row 0.
        table_BM = np.array(cache.table_BM)
        table_BM[1:, :4] = table_BM[0, :4]
        states = jax.tree.map(lambda x: jnp.repeat(x[:, :, :1], B, 2), cache.states)
        cache = cache._replace(
            states=states, table_BM=table_BM, length_B=np.full(B, 16, np.int32)
        )
        h, _ = extend(model, variables, tokens[:, 16:32], np.array([3, 16, 9]), cache)
        for row, count in enumerate((3, 16, 9)):
            np.testing.assert_allclose(
                h[row, :count], want[row, 16 : 16 + count], rtol=1e-10, atol=1e-12
            )


def test_states_do_not_grow_and_pages_do():
    model = models.hybrid().model
    short, long = (
        cache_lib.cache_bytes(cache_lib.cache_shape(model, 2, length, page_size=8))
        for length in (64, 1024)
    )
    assert short["states"] == long["states"] == 2 * 2 * 2 * 8 * 8 * 4
    assert short["conv tails"] == long["conv tails"] == 2 * 2 * 3 * 3 * 16 * 4
    assert long["pages"] == 16 * short["pages"] == 2 * 2 * 1024 * (8 + 4) * 4
