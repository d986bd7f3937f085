"""Build a run from its configuration: rows, sharded model, checks, optimizer, loss."""
