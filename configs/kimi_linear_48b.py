"""Kimi-Linear-48B-A3B as published: 27 layers, 256 experts, no latent, no AttnRes.

Question: how does K3 differ from its predecessor?
Command:  python -m experiments.doctor --config=configs/kimi_linear_48b.py
Cost:     the command allocates nothing and takes seconds.
Expect:   49.1 B parameters.

The report's recipe is 1.4 T tokens at a learning rate of 1.1e-3 and a context of 4096.
"""

from configs import common


def get_config():
    config = common.base()
    config.name = "kimi_linear_48b"
    model = config.model
    model.vocab_size = 163840
    model.width = 2304
    model.num_layers = 27
    # Layers 4, 8, ..., 24 are MLA, and so is layer 27.
    model.attention = ("kda*3", "mla") * 6 + ("kda*2", "mla")
    model.dtype = "bfloat16"
    model.kda.update(
        num_heads=32,
        key_dim=128,
        value_dim=128,
        gate="softplus",
        gate_rank=128,
        chunk_size=64,
        output_gate="low_rank",
    )
    model.mla.update(
        num_heads=32,
        q_rank=None,
        kv_rank=512,
        nope_dim=128,
        pe_dim=64,
        value_dim=128,
        output_gate=False,
    )
    model.gqa.update(num_heads=32, num_kv_heads=8, head_dim=128)
    model.ffn.update(width=9216, activation="swiglu")
    model.moe.update(
        num_experts=256,
        num_active=8,
        num_shared=1,
        expert_width=1024,
        latent_width=None,
        latent_norm=False,
        routed_scaling=2.446,
    )
    model.moe.balancing.update(method="sign", threshold_cap=16)
    model.residual.update(kind="none", block_size=9.0)
    config.optimizer.muon_dtype = "bfloat16"
    config.optimizer.learning_rate = 1.1e-3
    config.train.update(
        steps=340_000, batch_size=1024, seq_len=4096, micro_batches=4, remat="unit"
    )
    config.mesh.update(data=1, fsdp=-1)
    return config
