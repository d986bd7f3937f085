"""Checkpoints in an object store."""
