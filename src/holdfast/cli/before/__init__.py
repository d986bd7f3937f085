"""What is looked at before a run starts: whether it fits, whether it would start."""
