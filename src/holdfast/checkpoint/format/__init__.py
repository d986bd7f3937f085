"""The format of a checkpoint: manifest, snapshot in memory, DCP files, and their verification."""
