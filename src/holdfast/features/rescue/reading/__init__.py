"""Other systems' checkpoints, read without running anything they bring."""
