"""The format of a checkpoint: manifest, snapshot in memory, files of tensors, and their verification."""
