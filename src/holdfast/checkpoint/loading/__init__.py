"""Load a checkpoint: match it with the live model and optimizer, read and verify it at any number of ranks, set it."""
