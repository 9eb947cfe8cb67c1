"""Commands. Each is `python -m experiments.X --config=configs/FILE.py[:arg] ...`."""
