"""Reinforcement learning on what the policy did in environments (docs/rl_learning.md).

advantages  rewards of a group to credit of each turn
experience  trajectories packed into rows for a step
losses      what the policy is moved by, and what is watched
step        the optimizer step and the scoring pass, as programs
segments    log-probabilities of rows that are longer than memory
agreement   how far sampler and learner differ
"""
