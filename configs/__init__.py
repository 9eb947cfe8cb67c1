"""Experiment files: plain values in `ml_collections`, one file an experiment."""
