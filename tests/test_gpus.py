"""GPUs that a run cannot use are named, by what a made-up nvidia-smi says."""

import pytest

from kimi_jax import gpus
from kimi_jax.errors import UserError

CARDS = "0, NVIDIA H200, 4 MiB, 143771 MiB\n1, NVIDIA H200, {} MiB, 143771 MiB\n"
PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\t{}\t
 GPU1\t{}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def check(used=4, peers="OK", **environment):
    def ask(arguments):
        return PEERS.format(peers, peers) if "topo" in arguments else CARDS.format(used)

    gpus.check(environment, ask)


def test_free_cards_that_see_each_other_are_fine():
    check()
    gpus.check({}, lambda _: "")  # no nvidia-smi
    check(used=120_000, JAX_PLATFORMS="cpu")


def test_a_card_in_use_is_named_with_those_that_are_free():
    with pytest.raises(
        UserError, match=r"GPU 1 \(NVIDIA H200\): 117.2 of 140.4 GiB"
    ) as e:
        check(used=120_000)
    assert "CUDA_VISIBLE_DEVICES=0" in str(e.value)
    check(used=120_000, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(UserError, match="GPU 1"):
        check(used=120_000, CUDA_VISIBLE_DEVICES="1")


@pytest.mark.parametrize("status", ["CNS", "NS", "TNS", "GNS"])
def test_cards_without_peer_access_are_named(status):
    with pytest.raises(UserError, match="GPU 0 and GPU 1 have no peer access"):
        check(peers=status)
    check(peers=status, CUDA_VISIBLE_DEVICES="0")
