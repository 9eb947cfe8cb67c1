"""Packing changes no token's loss: documents in one window are as good as apart."""

import jax
import numpy as np
import pytest

from kimi_jax.data.documents import Documents
from kimi_jax.data.windows import Pool, pack, padding_batch
from kimi_jax.modules import transformer
from kimi_jax.train.step import Batch, token_losses
from tests import tiny
from tests.data.stores import PAD, random_store

LENGTH = 32


@pytest.mark.slow
def test_losses_in_best_fit_windows_are_those_of_documents_alone():
    store = random_store([20, 9, 6])  # 19 + 8 + 5 inputs: one full window
    documents = Documents(store.tokens_N, store.offsets_M[:-1], store.offsets_M[1:])
    packed = Pool((pack(documents, LENGTH, "best_fit"),), LENGTH, PAD)
    assert packed.windows == 1
    batch = padding_batch(4, LENGTH, PAD)
    packed.write(batch, np.array([0]), np.array([0]))
    for d in range(3):
        alone = pack(documents.select(np.arange(3) == d), LENGTH, "best_fit")
        Pool((alone,), LENGTH, PAD).write(batch, np.array([d + 1]), np.array([0]))
    with jax.enable_x64(True):
        # Layers kda, kda, mla, with experts in all but the first.
        cfg = tiny.make("model.dtype=float64", "model.num_layers=3")
        variables = tiny.variables(cfg.model)

        @jax.jit
        def losses(arrays):
            out = transformer.apply(
                cfg.model, variables, arrays.tokens_BT, arrays.segment_ids_BT
            )
            return token_losses(cfg, out, arrays)[1]

        names = ("tokens", "targets", "segment_ids", "weights")
        losses_BT = np.asarray(losses(Batch(*(batch[name] for name in names))))
    segments_T = batch["segment_ids"][0]
    assert segments_T.tolist() == [1] * 19 + [2] * 8 + [3] * 5
    for d in range(3):
        together = losses_BT[0, segments_T == d + 1]
        apart = losses_BT[d + 1, : len(together)]
        np.testing.assert_allclose(together, apart, rtol=1e-10)
    # The comparison would see a leak: documents differ, and so do their losses.
    assert losses_BT[0].std() > 1e-3
