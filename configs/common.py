"""The values that experiments start from; each file changes what it is about.

The sections and fields mirror `kimi_jax/config.py`, which says what each one means.
"""

from ml_collections import ConfigDict


def base() -> ConfigDict:
    """Every field: K3's switches on a model small enough for a laptop."""
    return ConfigDict(
        {
            "name": "base",
            "model": model(),
            "data": data(),
            "optimizer": optimizer(),
            "train": train(),
            "alerts": alerts(),
            "sample": {"prompt": "KING", "num_tokens": 200, "temperature": 0.8},
            "evaluation": {
                "examples": 64,
                "batch_tokens": 16_384,
                "max_length": 2**20,
                "seed": 0,
            },
            "mesh": {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1},
            "cluster": cluster(),
            "monitor": {"profile": "", "prometheus_port": None},
            "rl": None,
        }
    )


def data() -> dict:
    return {
        "sources": ("",),  # Shakespeare's plays
        "tokenizer": "bytes",
        "haystack": "generated",
        "validation_fraction": 0.05,
        "seed": 0,
        "packing": "split",
        "mixture": (),
        "strata": (),
        "strata_mixture": (),
    }


def model() -> dict:
    return {
        "vocab_size": 272,  # 256 bytes and 16 special tokens
        "width": 128,
        "num_layers": 4,
        "attention": ("kda*3", "mla"),
        "norm_eps": 1e-5,
        "init_std": 0.02,
        "dtype": "float32",
        **attention(),
        "ffn": {
            "num_dense_layers": 1,
            "width": 512,
            "activation": "situ",
            "situ_beta": 4.0,
            "situ_linear_beta": 25.0,
        },
        "moe": {
            "num_experts": 16,
            "num_active": 2,
            "num_shared": 2,
            "expert_width": 64,
            "latent_width": 64,
            "latent_norm": True,
            "router_input": "full",
            "routed_scaling": 1.0,
            "balancing": balancing(),
            "implementation": None,
            "dispatch": "capacity",
            "capacity_factor": 1.25,
        },
        "residual": {"kind": "block_attention", "block_size": 1.0},
        "vision": None,
    }


def attention() -> dict:
    return {
        "kda": {
            "num_heads": 4,
            "key_dim": 32,
            "value_dim": 32,
            "conv_width": 4,
            "gate": "bounded",
            "gate_lower_bound": -5.0,
            "gate_granularity": "channel",
            "gate_rank": 32,
            "output_gate": "full",
            "chunk_size": 16,  # compiles and runs fastest on a CPU
            "residuals": "all",
            "implementation": None,
        },
        "mla": {
            "num_heads": 4,
            "q_rank": 48,
            "kv_rank": 32,
            "nope_dim": 32,
            "pe_dim": 16,
            "value_dim": 32,
            "output_gate": True,
            "positions": "none",
            "rope_base": 10000.0,
            "latent_norm_eps": 1e-6,
            "block_size": 64,
        },
        "gqa": {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "positions": "none",
            "rope_base": 10000.0,
            "block_size": 512,
        },
    }


def vision() -> dict:
    """For `model.vision`: a tower for a laptop."""
    return {
        "patch_size": 14,
        "width": 64,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 32,
        "mlp_width": 256,
        "position_rows": 8,
        "position_columns": 8,
        "max_frames": 4,
        "rope_base": 10000.0,
        "merge": 2,
        "projector_norm_eps": 1e-5,
        "placeholder": 259,  # the first special token that bytes leave free
        "block_size": 512,
    }


def balancing() -> dict:
    return {
        "method": "quantile",
        "bins": 1000,
        "ema": 0.0,
        "step": 1e-3,
        "low": 0.25,
        "high": 0.75,
        "threshold_cap": 4,
        "aux_weight": 1e-2,
    }


def optimizer() -> dict:
    return {
        "kind": "muon",
        "muon_per_head": True,
        "muon_momentum": 0.95,
        "muon_update_rms": 0.2,
        "muon_dtype": "float32",
        "momentum_dtype": "float32",
        "qk_clip": None,
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "warmup_fraction": 0.01,
        "decay_fraction": 0.2,
        "decay_shape": "one_minus_sqrt",
        "final_fraction": 0.1,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "adam_b1": 0.9,
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
    }


def train() -> dict:
    return {
        "steps": 1000,
        "batch_size": 16,
        "seq_len": 256,
        "row_patches": 0,
        "row_items": 0,
        "micro_batches": 1,
        "seed": 0,
        "init_from": "",
        "remat": "none",
        "loss_chunk": 4096,
        "z_loss": 0.0,
        "log_every": 10,
        "eval_every": 100,
        "eval_batches": 8,
        "eval_length_multiples": (1,),
        "checkpoint_every": 100,
        "checkpoint_keep": 2,
        "checkpoint_keep_every": None,
        "on_nonfinite": "stop",
        "max_skips": 3,
    }


def cluster() -> dict:
    return {
        "coordinator": None,
        "processes": None,
        "process": None,
        "timeout": 1800,  # hosts of a large pod come up minutes apart
    }


def alerts() -> dict:
    return {
        "load_entropy": 0.7,
        "dead_steps": 200,
        "bias_update": 0.5,
        "loss_spike": 1.0,
        "throughput_drop": 0.5,
        "data_wait": 0.5,
        "policy_kl": 0.3,
        "mismatch": 0.05,
        "effective_samples": 0.2,
        "zero_variance": 0.9,
        "environment_errors": 0.1,
        "window": 20,
        "stop": (),
    }


def episodes(tasks: tuple[str, ...], skill: float) -> tuple[str, ...]:
    """For `data.sources`: experts who solve that share of their episodes."""
    return tuple(f"episodes:{task}:skill={skill}" for task in tasks)


def rl() -> dict:
    """For `rl`: reinforcement learning; the file names its environments."""
    return {
        "environments": (),
        "rewards": "task",
        "iterations": 100,
        "groups": 8,
        "group_size": 8,
        "steps_per_iteration": 1,
        "turn_tokens": 64,
        "max_turns": 16,
        "max_tokens": 1024,
        "max_calls": None,
        "max_seconds": None,
        "slots": 32,
        "decode_steps": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "advantage": "mean",
        "turn_credit": 0.0,
        "length_penalty": 0.0,
        "length_budget": 512,
        "ratio": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "correction_cap": 2.0,
        "kl_weight": 0.0,
        "kl_to": "start",
        "entropy_weight": 0.0,
        "aggregate": "token",
        "replay_routes": False,
        "update_balance": False,
        "max_staleness": 2,
        "reuse": 0.0,
        "teacher": "",
        "distill_weight": 0.0,
        "segment": None,
        "sampler": {
            "target_low": 0.2,
            "target_high": 0.8,
            "floor": 0.2,
            "ema": 0.8,
            "length_threshold": 0.0,
        },
        "rollout_mesh": None,
        "eval_tasks": 16,
        "keep_trajectories": 32,
    }


def parse_arg(arg: str, **defaults: int) -> dict:
    """The integers in `name=value,name=value`, on top of `defaults`.

    `--config=configs/FILE.py:depth=8` passes "depth=8" to the file's get_config.
    """
    values = dict(defaults)
    for item in filter(None, arg.split(",")):
        name, _, text = item.partition("=")
        if name not in defaults or not text.isdigit():
            raise ValueError(
                f"argument {item!r}: write {', '.join(f'{n}=NUMBER' for n in defaults)}"
            )
        values[name] = int(text)
    return values
