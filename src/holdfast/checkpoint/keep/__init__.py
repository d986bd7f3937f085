"""Which checkpoints are there, which one is chosen, which ones stay."""
