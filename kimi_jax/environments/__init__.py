"""Environments that a policy acts in by tokens: pure Python, deterministic by task.

    environment  the protocol: reset, step, expert; what a task and a step are
    format       roles and turns as tokens; which of them the policy wrote
    dialogue     what the families share: turns as text, limits, length by padding
    tools        look-ups that depend on earlier answers
    documents    questions on long documents whose facts are revised
    code         a change across the files of a small code base; interpreter runs it
    specs        "tools:difficulty=1/2:length=1K": names and dials of all of them
    rewards      a reward of one's own: one function around any environment
    episodes     a guard against faults, expert episodes, replay

`kimi_jax.data.episode_windows` makes training data of expert episodes.
"""
