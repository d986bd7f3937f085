"""Advantages: pure functions of the rewards of groups of completions."""
