"""Looking into checkpoints without loading them."""
