"""Reward functions: rules, mathematics, a judge model behind an endpoint, and calling functions of the user."""
