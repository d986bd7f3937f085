"""Processes that score, and what passes between them: framing, folders, confinement, the pool."""
