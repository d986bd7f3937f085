"""Sampling completions from the policy that is being trained: the engine protocol and engines in this process."""
