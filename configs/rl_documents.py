r"""A small model learns to find and read the pages that answer a question.

Question: does reinforcement learning take a policy that seldom finds the fact that
          holds to one that mostly does, over turns of search and reading?
Command:  python -m experiments.train --config=configs/rl_documents.py:warm \
              --workdir=runs/documents_warm
          python -m experiments.rl --config=configs/rl_documents.py \
              --config.train.init_from=runs/documents_warm --workdir=runs/documents_rl
Cost:     about twice that of configs/rl_tools.py, whose model this is: pages are longer
          than the answers of tools.
Expect:   success on held-out tasks that rises; not measured yet.

`:warm` imitates an expert who makes mistakes in most episodes. docs/rl.md goes the
whole way.
"""

from configs import common, rl_tools

SKILL = 0.25  # share of the episodes of the warm start that are solved
TASKS = (
    "documents:difficulty=1/2:length=192:pages=3:distractors=2",
    "documents:difficulty=3:length=288:pages=3:distractors=2",
)


def get_config(arg=""):
    config = rl_tools.get_config(arg)
    config.name = config.name.replace("tools", "documents")
    config.data.sources = common.episodes(TASKS, SKILL)
    config.train.seq_len = 384
    if arg == "warm":
        config.train.steps = 600
        config.train.checkpoint_every = 600
        return config
    config.rl.update(
        environments=tuple(f"{task}:process=1" for task in TASKS),
        turn_tokens=20,
        max_turns=10,
        max_tokens=385,
    )
    return config
