"""Advantages: pure functions from the rewards of groups to what each completion is worth."""
