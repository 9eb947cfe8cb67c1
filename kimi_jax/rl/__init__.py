"""Reinforcement learning on trajectories of many turns."""
