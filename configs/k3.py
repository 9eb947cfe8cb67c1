"""Kimi K3 as published: 93 layers, 896 experts, 2.78 T parameters, 104 B active.

Question: does a change hold at the published shape?
Command:  python -m experiments.doctor --config=configs/k3.py
Cost:     the command allocates nothing and takes seconds; training needs a pod.
Expect:   2,779.48 B text parameters, 104.19 B active.

Every model field is the released one. The report does not publish the peak learning
rate, the batch or the number of tokens: those below are placeholders of the usual size.

`configs/k3.py:length=65536` trains on longer rows, with a mesh for them: 4,096 devices
such as a v5p:16x16x16 in any case (docs/plans.md). `configs/k3.py:vision=1` adds the
vision tower and its projector, 401.2 M and 46.1 M parameters (docs/vision.md), and
`layers=12` keeps the first 12 layers. `serve=64` has a mesh for reading and decoding on
so many devices (docs/generation.md). `rl=1` learns from trajectories that fill a row.
"""

from configs import common

# Rows, micro-batches and mesh by the tokens of a row: 8,192 on a device.
STAGES = {
    8192: (2048, 4, {"fsdp": 8, "expert": 64, "context": 1, "tensor": 8}),
    65536: (256, 4, {"fsdp": 8, "expert": 8, "context": 8, "tensor": 8}),
    262144: (64, 4, {"fsdp": 8, "expert": 2, "context": 32, "tensor": 8}),
    1048576: (16, 4, {"fsdp": 4, "expert": 1, "context": 128, "tensor": 8}),
}
# Mesh for generation by devices: few layers' weights are gathered at a time, and a
# sequence of a million tokens needs its pages split.
SERVING = {
    64: {"fsdp": 1, "expert": 1, "context": 8, "tensor": 8},
    128: {"fsdp": 1, "expert": 1, "context": 16, "tensor": 8},
    256: {"fsdp": 1, "expert": 1, "context": 32, "tensor": 8},
}


def get_config(arg=""):
    options = common.parse_arg(arg, length=8192, layers=93, vision=0, serve=0, rl=0)
    length, layers = options["length"], options["layers"]
    if length not in STAGES:
        raise ValueError(f"length={length}: choose one of {list(STAGES)}")
    if not 1 <= layers <= 93:
        raise ValueError(f"layers={layers}: K3 has 93; choose 1 to 93")
    rows, micro_batches, mesh = STAGES[length]
    config = common.base()
    config.name = "k3" if length == 8192 else f"k3_{length}"
    config.name += "" if layers == 93 else f"_{layers}_layers"
    model = config.model
    model.vocab_size = 163840
    model.width = 7168
    model.num_layers = layers
    # Layers 4, 8, ..., 92 are MLA, and so is layer 93.
    kinds = ("kda", "kda", "kda", "mla") * 23 + ("mla",)
    model.attention = kinds[:layers]
    model.norm_eps = 1e-5
    model.init_std = 0.02
    model.dtype = "bfloat16"
    model.kda.update(
        num_heads=96, key_dim=128, value_dim=128, gate_rank=128, chunk_size=64
    )
    model.mla.update(
        num_heads=96,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        pe_dim=64,
        value_dim=128,
        block_size=512,
    )
    model.gqa.update(num_heads=96, num_kv_heads=8, head_dim=128)
    model.ffn.width = 33792
    model.moe.update(
        num_experts=896,
        num_active=16,
        num_shared=2,
        expert_width=3072,
        latent_width=3584,
    )
    model.moe.balancing.threshold_cap = 32
    model.residual.block_size = 12.0
    config.optimizer.muon_dtype = "bfloat16"
    config.optimizer.learning_rate = 2e-4
    config.train.update(
        steps=500_000,
        batch_size=rows,
        seq_len=length,
        micro_batches=micro_batches,
        remat="unit",
        loss_chunk=2**21,  # 4,096 tokens on a device
    )
    config.mesh.update(mesh)
    add_options(config, options)
    return config


def add_options(config, options):
    """What `serve`, `vision` and `rl` ask for."""
    if options["serve"]:
        if options["serve"] not in SERVING:
            raise ValueError(f"serve={options['serve']}: choose one of {[*SERVING]}")
        config.mesh.update(SERVING[options["serve"]])
    if options["vision"]:
        add_vision(config)
    if options["rl"]:
        add_rl(config)


def add_vision(config):
    """The released tower; images may take half of the positions of a row."""
    config.name += "_vision"
    config.model.vision = common.vision()
    config.model.vision.update(
        width=1024,
        num_layers=27,
        num_heads=12,
        head_dim=128,
        mlp_width=4096,
        position_rows=64,
        position_columns=64,
        placeholder=163605,
    )
    config.train.update(row_patches=2 * config.train.seq_len, row_items=64)


def add_rl(config):
    """Questions on documents that are as long as a row."""
    config.name += "_rl"
    config.rl = common.rl()
    length = config.train.seq_len
    config.rl.update(
        environments=(f"documents:difficulty=3/4/5:length={length // 1024}K",),
        iterations=config.train.steps,
        groups=config.train.batch_size,
        turn_tokens=1024,
        max_turns=64,
        max_tokens=length + 1,
        replay_routes=True,
    )
