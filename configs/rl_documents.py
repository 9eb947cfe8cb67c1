r"""A small model learns to find and read the pages that answer a question.

Question: does reinforcement learning take a policy that seldom finds the fact that
          holds to one that mostly does, over turns of search and reading?
Command:  python -m experiments.train --config=configs/rl_documents.py:warm \
              --workdir=runs/documents_warm
          python -m experiments.rl --config=configs/rl_documents.py \
              --config.train.init_from=runs/documents_warm --workdir=runs/documents_rl
Cost:     about 6 CPU-minutes for the warm start and 8 for the rest; 0.3 M
          parameters.
Expect:   success on held-out tasks from 25 % to 92 % after 20 of the 40 iterations; see
          docs/rl.md.

`:warm` imitates an expert who makes mistakes in most episodes. docs/rl.md goes the
whole way.
"""

from configs import common, rl_tools

SKILL = 0.25  # share of the episodes of the warm start that are solved
# Facts lie on many pages, so that the page that is read seldom has a second line.
TASKS = ("documents:difficulty=1/2:length=144:pages=8:distractors=1",)


def get_config(arg=""):
    config = rl_tools.get_config(arg)
    config.name = config.name.replace("tools", "documents")
    config.data.sources = common.episodes(TASKS, SKILL)
    if config.rl is not None:
        environments = tuple(f"{task}:process=1" for task in TASKS)
        config.rl.update(environments=environments, max_tokens=177)
    return config
