"""Training: optimizer, one step, checkpoints, metrics, and the loop that ties them."""
