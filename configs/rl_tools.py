r"""A small model learns to use tools over many turns, from rewards.

Question: does reinforcement learning take a policy that seldom solves a task of
          several look-ups to one that nearly always does?
Command:  python -m experiments.train --config=configs/rl_tools.py:warm \
              --workdir=runs/tools_warm
          python -m experiments.rl --config=configs/rl_tools.py \
              --config.train.init_from=runs/tools_warm --workdir=runs/tools_rl
Cost:     about 6 CPU-minutes of each; 0.3 M parameters.
Expect:   success on held-out tasks from 29 % to 95 %, the mean of three seeds; see
          docs/rl.md.

`:warm` imitates an expert who makes mistakes in most episodes, so that the policy knows
how tools are used and seldom gets to the end. Controls: the second command with
--config.rl.rewards=shuffled, whose rewards say nothing, and the first one with more
steps, whose experts get no better. docs/rl.md goes the whole way.
"""

from configs import common

SKILL = 0.25  # share of the episodes of the warm start that are solved
# Just long enough: filler would cost time and teach nothing.
TASKS = ("tools:difficulty=1/2:length=96", "tools:difficulty=3:length=128")


def get_config(arg=""):
    if arg not in ("", "warm"):
        raise ValueError(f"argument {arg!r}: write warm, or nothing")
    config = common.base()
    config.name = "rl_tools"
    config.data.sources = common.episodes(TASKS, SKILL)
    model = config.model
    model.update(width=96, num_layers=2, attention=("kda", "mla"))
    model.kda.update(num_heads=3, key_dim=32, value_dim=32, gate_rank=16)
    model.mla.update(num_heads=3, q_rank=None, kv_rank=48, block_size=64)
    model.ffn.update(num_dense_layers=2, width=256)
    model.residual.kind = "additive"
    config.train.update(seq_len=256, batch_size=16, loss_chunk=8192)
    config.sample.update(prompt="", num_tokens=16)
    if arg == "warm":
        config.name = "rl_tools_warm"
        config.optimizer.update(learning_rate=1.5e-2, weight_decay=0.0)
        config.train.update(
            steps=600, log_every=20, eval_every=100, checkpoint_every=600
        )
        return config
    config.optimizer.update(
        kind="adamw",
        learning_rate=1.5e-3,
        schedule="wsd",
        warmup_fraction=0.02,
        weight_decay=0.0,
    )
    config.rl = common.rl()
    config.rl.update(
        # Half of the credit is for look-ups that were right, whatever became of them.
        environments=tuple(f"{task}:process=1" for task in TASKS),
        turn_credit=0.5,
        iterations=40,
        groups=16,
        group_size=8,
        steps_per_iteration=2,
        turn_tokens=16,
        max_turns=10,
        max_tokens=161,
        slots=16,
        decode_steps=24,  # a turn, or an answer, in one call
    )
    config.train.update(steps=80, batch_size=32, eval_every=20, checkpoint_every=20)
    return config
