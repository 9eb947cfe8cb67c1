"""Several GPUs of one host: is a sharded step right, and how much faster is it?

Question: what do 2, 4 or 8 GPUs gain for KDA over time, for experts and for a step?
Command:  python -m experiments.bench --config=configs/bench_multi_gpu.py \
              --workdir=runs/bench_multi_gpu
          and, one process a GPU, experiments/launch/local.sh --processes=2 \
              --module=experiments.bench -- with the same arguments
Cost:     10 minutes on two H200 and 32 idle processor cores; 130 GB of memory on the
          first GPU for 1M tokens alone (XLA_PYTHON_CLIENT_MEM_FRACTION=.94).
Expect:   docs/multi_gpu.md holds the tables; every check passes.

With `:tiny` after the file's name, the same on simulated devices, in minutes.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(size: str = "full"):
    if size not in ("full", "tiny"):
        raise ValueError(f"{size!r}: write full or tiny")
    config = ConfigDict()
    config.suite = "multi_gpu"
    checks = ("meshes", "dispatch", "kda_check")
    config.parts = (*checks, "links", "kda", "experts", "step")
    # A file that benches of one machine share: all compile, one measures. "": none.
    config.turns = ""
    # -1 takes the devices that are left; what needs more than there are is left out.
    config.meshes = (
        *("data=-1", "fsdp=-1", "expert=-1", "tensor=-1", "context=-1"),
        *("fsdp=2,context=-1", "expert=2,tensor=-1"),
    )
    config.check_model = check_model()
    # Experts that are dispatched to, tokens of all devices together, and their width.
    config.dispatch_experts = (64, 896)
    config.dispatch_tokens = 4096
    config.dispatch_width = 256
    config.link_bytes = 2**28
    # KDA: inputs are bfloat16.
    config.kda_lengths = (2**17, 2**20)
    config.kda_heads = 32
    config.kda_check_length = 4096
    config.width = 128
    # The routed experts of a layer, forward and backward.
    config.latents = (1024, 3584)
    config.experts = 896
    config.active = 16
    config.expert_width = 2048
    config.expert_tokens = 16384
    config.expert_dtype = "bfloat16"
    config.capacity_factor = 1.25
    config.step_model = step_model()
    # Sets of compiler flags, and those that each mesh is timed with.
    config.step_flags = step_flags()
    config.step_meshes = {
        "data=1": ("defaults",),
        "fsdp=-1": ("defaults", *(name for name in step_flags() if name != "defaults")),
        "context=-1": ("defaults", "latency hiding"),
    }
    config.trace = True
    config.calls = 10
    config.rounds = 5
    config.cluster = {**common.cluster(), "timeout": 120}
    if size == "tiny":
        make_tiny(config)
    return config


def check_model() -> tuple[str, ...]:
    """Two layers with every part that is split; float32, then bfloat16."""
    return (
        "model.num_layers=2",
        "model.attention=kda,mla",
        "model.width=128",
        "model.residual.block_size=1",
        "model.kda.num_heads=8",
        "model.mla.num_heads=8",
        "model.ffn.width=256",
        "model.ffn.num_dense_layers=0",
        "model.moe.num_experts=16",
        "model.moe.num_active=4",
        "model.moe.capacity_factor=16",  # drops would be another step
        "train.batch_size=8",
        "train.seq_len=256",
    )


def step_model() -> tuple[str, ...]:
    """1.04 B active parameters of 2.78 B: 15 layers of KDA, 5 of MLA."""
    return (
        "model.dtype=bfloat16",
        "model.vocab_size=32768",
        "model.width=2048",
        "model.num_layers=20",
        "model.attention=kda*3,mla",
        "model.kda.num_heads=16",
        "model.kda.key_dim=128",
        "model.kda.value_dim=128",
        "model.kda.gate_rank=128",
        "model.kda.chunk_size=64",
        "model.mla.num_heads=16",
        "model.mla.q_rank=512",
        "model.mla.kv_rank=256",
        "model.mla.nope_dim=128",
        "model.mla.pe_dim=64",
        "model.mla.value_dim=128",
        "model.mla.block_size=512",
        "model.ffn.width=6144",
        "model.moe.num_experts=32",
        "model.moe.num_active=4",
        "model.moe.expert_width=1024",
        "model.moe.latent_width=1024",
        "model.residual.block_size=4",
        "optimizer.muon_dtype=bfloat16",
        "optimizer.learning_rate=1e-4",
        "train.batch_size=4",
        "train.seq_len=16384",
        "train.remat=unit",
    )


def step_flags() -> dict[str, dict]:
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    large = {
        f"xla_gpu_{kind}_combine_threshold_bytes": 2**28
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    return {
        "defaults": {},
        "no latency hiding": {scheduler: False},
        "latency hiding": {scheduler: True},
        "latency hiding, large combines": {scheduler: True, **large},
        # Latency hiding, and collectives of a loop's next turn in this one.
        "O1": {"optimization_level": "O1"},
    }


def make_tiny(config: ConfigDict) -> None:
    small = (
        *("model.width=32", "model.kda.num_heads=4", "model.mla.num_heads=4"),
        *("model.kda.key_dim=8", "model.kda.value_dim=8", "model.ffn.width=32"),
        *("model.moe.expert_width=16", "model.moe.latent_width=16"),
    )
    quick = "model.num_layers=1", "model.attention=gqa", "model.residual.kind=none"
    config.check_model += (*small, *quick, "train.seq_len=48")
    config.step_model += (
        *("model.dtype=float32", "model.vocab_size=272", *small, *quick),
        *("train.seq_len=64", "optimizer.kind=adamw"),
    )
    config.dispatch_tokens, config.dispatch_width = 64, 16
    config.link_bytes = 2**12
    config.kda_lengths, config.kda_heads, config.kda_check_length = (256,), 2, 128
    config.width, config.latents, config.experts, config.active = 16, (16,), 16, 4
    config.expert_width, config.expert_tokens = 16, 64
    config.expert_dtype = "float32"
    config.trace, config.calls, config.rounds = False, 2, 1
