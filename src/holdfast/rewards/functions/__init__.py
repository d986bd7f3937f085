"""Rewards that are called with completions: rules, mathematics, a judge, functions of the user."""
