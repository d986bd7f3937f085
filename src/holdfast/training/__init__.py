"""The training loop: one update rule for every recipe."""
