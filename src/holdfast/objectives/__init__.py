"""Losses: pure functions from the scores of a batch to a weighted sum over tokens."""
