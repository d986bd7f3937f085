"""From tensors to files: assembling, writing, agreeing, rehearsing."""
