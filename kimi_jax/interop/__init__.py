"""Published Hugging Face checkpoints in and out: names, bytes, configs, parity."""
