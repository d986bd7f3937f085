"""LoRA adapters: their targets, files, and merging them into the weights."""
