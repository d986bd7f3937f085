"""Read and compare single tensors of checkpoints, without a model and without ranks."""
