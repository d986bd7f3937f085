"""From a configuration to a run: the model on its ranks, rows, optimizer, loss."""
