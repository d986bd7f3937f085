"""Losses: pure functions from scores and a batch to a sum."""
