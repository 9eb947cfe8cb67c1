"""Reinforcement learning on what the policy did in environments (docs/rl.md).

loop         a run from top to bottom
players      environments and generators, and where they run
learner      rows, scores and optimizer steps of an iteration
memory       what a run knows besides its parameters
health       what trajectories say about a run
archive      trajectories as files
viewer       trajectories for people
storage      plain values and arrays as bytes

trajectory, members, rollout, rollout_state, task_sampler, buffer: docs/rollouts.md

advantages  rewards of a group to credit of each turn (docs/rl_learning.md)
experience  trajectories packed into rows for a step
losses      what the policy is moved by, and what is watched
step        the optimizer step and the scoring pass, as programs
segments    log-probabilities of rows that are longer than memory
agreement   how far sampler and learner differ
"""
