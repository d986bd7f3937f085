"""What a checkpoint is on disk and in memory, and how that is verified."""
